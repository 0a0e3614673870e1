"""A tiny operation that needs no kernel: the harness is tested with it, right and wrong."""

from collections.abc import Sequence

import torch

from bench.checks import Verdict, no_worse_than_torch
from bench.op import Case, OpSpec, Provider, Tuning


def make_inputs(case: Case, device: torch.device, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator(device).manual_seed(seed)
    shape = (case["rows"], case["H"])
    x = torch.randn(shape, generator=generator, device=device, dtype=torch.float32)
    return {"x": x.to(case.torch_dtype)}


def reference(inputs: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    return inputs["x"] * 2, inputs["x"].double() * 2


def check(out: torch.Tensor, expected: tuple[torch.Tensor, torch.Tensor]) -> Verdict:
    return no_worse_than_torch(out, *expected)


def provider(function, **options) -> Provider:
    return Provider(lambda inputs: lambda: function(inputs["x"]), **options)


def raises(x: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("no kernel image")


SMALL_CASES = (Case(rows=2, H=16, dtype="fp32"),)


def toy_op(small_cases: Sequence[Case] = SMALL_CASES, **more: Provider) -> OpSpec:
    cases = [Case(rows=rows, H=64, dtype="fp32") for rows in (1, 8, 64)]
    return OpSpec(
        name="double",
        cases=cases,
        small_cases=small_cases,
        make_inputs=make_inputs,
        reference=reference,
        check=check,
        providers={"torch": provider(lambda x: x + x), **more},
        baseline="torch",
        bytes=lambda case: 8 * case["rows"] * case["H"],
        flops=lambda case: case["rows"] * case["H"],
        axes=("rows",),
        tuning=Tuning(lambda case: (2.0, 3.0), lambda i, factor: lambda: i["x"] * factor),
    )
