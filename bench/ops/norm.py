"""RMSNorm, add + RMSNorm in place, and the two norms in front of an EAGLE-3 draft."""

import importlib
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.checks import Verdict, no_worse_than_torch
from bench.op import Case, Inputs, OpSpec, Provider, Thunk, Tuning
from bench.ops._norm_inputs import (
    EPS,
    GEMMA,
    ROWS,
    SMALL,
    SMALL_GEMMA,
    WIDTHS,
    dual_inputs,
    single_inputs,
    size,
)
from bench.providers import compiled, needs, needs_gpu, poisoned
from frspec_kernels import norm


def _plain(x: Tensor, weight: Tensor, gemma: bool) -> Tensor:
    return F.rms_norm(x, weight.shape, 1 + weight if gemma else weight, EPS)


def _flashinfer(name: str) -> Callable[..., Any]:
    return getattr(importlib.import_module("flashinfer.norm"), name)


def _sgl_kernel(name: str) -> Callable[..., Any]:
    """The operator itself: the package's Python functions call flashinfer's when that is there."""
    importlib.import_module("sgl_kernel")  # registers the operators
    operator = getattr(torch.ops.sgl_kernel, name).default
    return lambda *tensors: operator(*tensors, EPS, True)


# rms_norm


def _norm_reference(inputs: Inputs) -> tuple[Tensor, Tensor]:
    x, weight, gemma = inputs["x"], inputs["weight"], inputs["gemma"]
    truth = norm.rms_norm_reference(x.double(), weight.double(), EPS, gemma=gemma)
    return _plain(x, weight, gemma), truth


def _ours_norm(inputs: Inputs, config: norm.LaunchConfig | None = None) -> Thunk:
    x, weight, gemma = inputs["x"], inputs["weight"], inputs["gemma"]
    out = poisoned(*x.shape, dtype=x.dtype, device=x.device)
    return lambda: norm.rms_norm(x, weight, EPS, out=out, gemma=gemma, config=config)


def _torch_norm(function: Callable[..., Tensor]) -> Callable[[Inputs], Thunk]:
    return lambda i: lambda: function(i["x"], i["weight"], i["gemma"])


def _flashinfer_norm(inputs: Inputs) -> Thunk:
    function = _flashinfer("gemma_rmsnorm" if inputs["gemma"] else "rmsnorm")
    x, weight, out = inputs["x"], inputs["weight"], torch.full_like(inputs["x"], float("nan"))
    return lambda: function(x, weight, EPS, out=out)


def _sgl_kernel_norm(inputs: Inputs) -> Thunk:
    function = _sgl_kernel("gemma_rmsnorm" if inputs["gemma"] else "rmsnorm")
    x, weight, out = inputs["x"], inputs["weight"], torch.full_like(inputs["x"], float("nan"))

    def call() -> Tensor:
        function(out, x, weight)
        return out

    return call


# add_rms_norm


def _add_reference(inputs: Inputs) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    x, residual, weight = inputs["x"], inputs["residual"], inputs["weight"]
    total = x + residual
    truth = norm.add_rms_norm_reference(
        x.double(), residual.double(), weight.double(), EPS, gemma=inputs["gemma"]
    )
    return (_plain(total, weight, inputs["gemma"]), total), truth


def _check_add(out: tuple[Tensor, Tensor], reference: Any) -> Verdict:
    (plain, plain_total), (truth, total) = reference
    normed = no_worse_than_torch(out[0], plain, truth, "normalised sum")
    return normed & no_worse_than_torch(out[1], plain_total, total, "residual")


def _add_chain(x: Tensor, residual: Tensor, weight: Tensor, gemma: bool) -> tuple[Tensor, Tensor]:
    residual += x
    return _plain(residual, weight, gemma), residual


def _torch_add(function: Callable[..., Any]) -> Callable[[Inputs], Thunk]:
    return lambda i: lambda: function(i["x"], i["residual"], i["weight"], i["gemma"])


def _in_place(function: Callable[..., Any], inputs: Inputs) -> Thunk:
    x, residual, weight = inputs["x"], inputs["residual"], inputs["weight"]

    def call() -> tuple[Tensor, Tensor]:
        function(x, residual, weight)
        return x, residual

    return call


def _ours_add(inputs: Inputs, config: norm.LaunchConfig | None = None) -> Thunk:
    def function(x: Tensor, residual: Tensor, weight: Tensor) -> None:
        norm.add_rms_norm(x, residual, weight, EPS, gemma=inputs["gemma"], config=config)

    return _in_place(function, inputs)


def _flashinfer_add(inputs: Inputs) -> Thunk:
    name = "gemma_fused_add_rmsnorm" if inputs["gemma"] else "fused_add_rmsnorm"
    function = _flashinfer(name)
    return _in_place(lambda *tensors: function(*tensors, EPS), inputs)


def _sgl_kernel_add(inputs: Inputs) -> Thunk:
    name = "gemma_fused_add_rmsnorm" if inputs["gemma"] else "fused_add_rmsnorm"
    return _in_place(_sgl_kernel(name), inputs)


# dual_norm_concat


def _dual_chain(ids: Tensor, table: Tensor, hidden: Tensor, left: Tensor, right: Tensor) -> Tensor:
    embedded = F.embedding(ids, table)
    return torch.cat([_plain(embedded, left, False), _plain(hidden, right, False)], dim=-1)


def _dual_reference(inputs: Inputs) -> tuple[Tensor, Tensor]:
    ids, table, hidden = inputs["ids"], inputs["embedding"], inputs["hidden"]
    left, right = inputs["weights"]
    rows = torch.arange(len(ids), device=ids.device)
    truth = norm.dual_norm_concat_reference(
        rows, table[ids].double(), hidden.double(), left.double(), right.double(), EPS
    )
    return _dual_chain(ids, table, hidden, left, right), truth


def _torch_dual(function: Callable[..., Tensor]) -> Callable[[Inputs], Thunk]:
    def make(i: Inputs) -> Thunk:
        left, right = i["weights"]
        return lambda: function(i["ids"], i["embedding"], i["hidden"], left, right)

    return make


def _ours_dual(inputs: Inputs, config: norm.LaunchConfig | None = None) -> Thunk:
    ids, table, hidden = inputs["ids"], inputs["embedding"], inputs["hidden"]
    left, right = inputs["weights"]
    rows, width = hidden.shape
    out = poisoned(rows, 2 * width, dtype=hidden.dtype, device=hidden.device)
    return lambda: norm.dual_norm_concat(
        ids, table, hidden, left, right, EPS, out=out, config=config
    )


def _halves(function: Callable[[Tensor, Tensor, Tensor], Any], inputs: Inputs) -> Thunk:
    """A gather, then ``function(out, x, weight)`` straight into each half: no copy to concat."""
    ids, table, hidden = inputs["ids"], inputs["embedding"], inputs["hidden"]
    left, right = inputs["weights"]
    rows, width = hidden.shape
    out = poisoned(rows, 2 * width, dtype=hidden.dtype, device=hidden.device)

    def call() -> Tensor:
        function(out[:, :width], F.embedding(ids, table), left)
        function(out[:, width:], hidden, right)
        return out

    return call


def _flashinfer_dual(inputs: Inputs) -> Thunk:
    function = _flashinfer("rmsnorm")
    return _halves(lambda out, x, weight: function(x, weight, EPS, out=out), inputs)


def _providers(
    ours: Callable[..., Thunk],
    eager: Callable[..., Any],
    bind: Callable[..., Callable[[Inputs], Thunk]],
    flashinfer: Callable[[Inputs], Thunk],
    sgl_kernel: Callable[[Inputs], Thunk],
) -> dict[str, Provider]:
    return {
        "ours": Provider(ours),
        "torch": Provider(bind(eager)),
        "torch.compile": Provider(bind(compiled(eager)), needs_gpu),
        "flashinfer": Provider(flashinfer, needs("flashinfer")),
        "sgl_kernel": Provider(sgl_kernel, needs("sgl_kernel")),
    }


def _configs(case: Case) -> list[norm.LaunchConfig]:
    block = norm.launch_config(case["rows"], case["H"]).block
    return [
        norm.LaunchConfig(block, warps) for warps in (1, 2, 4, 8, 16, 32) if block >= 32 * warps
    ]


OPS = (
    OpSpec(
        name="rms_norm",
        cases=[*ROWS, *WIDTHS, *GEMMA],
        small_cases=[*SMALL, *SMALL_GEMMA],
        make_inputs=single_inputs,
        reference=_norm_reference,
        check=lambda out, reference: no_worse_than_torch(out, *reference),
        providers=_providers(_ours_norm, _plain, _torch_norm, _flashinfer_norm, _sgl_kernel_norm),
        baseline="torch",
        bytes=lambda case: (2 * case["rows"] + 1) * case["H"] * size(case),
        flops=lambda case: 4 * case["rows"] * case["H"],
        axes=("rows", "H"),
        tuning=Tuning(_configs, _ours_norm),
    ),
    OpSpec(
        name="add_rms_norm",
        cases=[*ROWS, *WIDTHS, *GEMMA],
        small_cases=[*SMALL, *SMALL_GEMMA],
        make_inputs=single_inputs,
        reference=_add_reference,
        check=_check_add,
        providers=_providers(_ours_add, _add_chain, _torch_add, _flashinfer_add, _sgl_kernel_add),
        baseline="torch",
        bytes=lambda case: (4 * case["rows"] + 1) * case["H"] * size(case),
        flops=lambda case: 5 * case["rows"] * case["H"],
        axes=("rows", "H"),
        tuning=Tuning(_configs, _ours_add),
    ),
    OpSpec(
        name="dual_norm_concat",
        cases=ROWS[:3],
        small_cases=SMALL,
        make_inputs=dual_inputs,
        reference=_dual_reference,
        check=lambda out, reference: no_worse_than_torch(out, *reference),
        providers=_providers(
            _ours_dual,
            _dual_chain,
            _torch_dual,
            _flashinfer_dual,
            lambda inputs: _halves(_sgl_kernel("rmsnorm"), inputs),
        ),
        baseline="torch",
        bytes=lambda case: (4 * case["rows"] + 2) * case["H"] * size(case) + 8 * case["rows"],
        flops=lambda case: 8 * case["rows"] * case["H"],
        axes=("rows",),
        tuning=Tuning(_configs, _ours_dual),
    ),
)
