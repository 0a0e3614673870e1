"""Cases and inputs of the norms."""

from functools import cache
from typing import Any

import torch
from torch import Tensor

from bench.op import Case

EPS = 1e-5
VOCAB = 128_256  # a table of 1 GB at 4,096: gathered rows are never in the L2 cache
SMALL_VOCAB = 53

ROWS = [Case(rows=rows, H=4096, dtype="bf16") for rows in (1, 16, 64, 1024, 8192)]
WIDTHS = [Case(rows=16, H=width, dtype="bf16") for width in (2048, 2880, 8192, 16_384)]
GEMMA = [Case(rows=16, H=3584, dtype="bf16", form="gemma")]
SMALL = [Case(rows=3, H=100, dtype=dtype) for dtype in ("bf16", "fp16", "fp32")]
SMALL_GEMMA = [Case(rows=2, H=576, dtype="fp32", form="gemma")]


def size(case: Case) -> int:
    """Bytes of an element."""
    return case.torch_dtype.itemsize


def is_gemma(case: Case) -> bool:
    """Whether the case scales by 1 + weight."""
    return case.params.get("form") == "gemma"


class _Random:
    """Tensors of a case's type from one seed."""

    def __init__(self, case: Case, device: torch.device, seed: int) -> None:
        self.generator = torch.Generator(device).manual_seed(seed)
        self.dtype, self.device, self.width = case.torch_dtype, device, case["H"]

    def rows(self, count: int) -> Tensor:
        shape = (count, self.width)
        return torch.empty(shape, dtype=self.dtype, device=self.device).normal_(
            generator=self.generator
        )

    def weight(self, mean: float) -> Tensor:
        return self.rows(1)[0] * 0.25 + mean

    def ids(self, count: int, below: int) -> Tensor:
        return torch.randint(below, (count,), device=self.device, generator=self.generator)


def single_inputs(case: Case, device: torch.device, seed: int) -> dict[str, Any]:
    """x and residual [rows, H], weight [H]."""
    random, gemma = _Random(case, device, seed), is_gemma(case)
    return {
        "x": random.rows(case["rows"]),
        "residual": random.rows(case["rows"]),
        "weight": random.weight(0.0 if gemma else 1.0),
        "gemma": gemma,
    }


@cache
def _embedding(vocab: int, width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """One table for all inputs: what rotates are the ids."""
    generator = torch.Generator(device).manual_seed(0)
    return torch.empty(vocab, width, dtype=dtype, device=device).normal_(generator=generator)


def dual_inputs(case: Case, device: torch.device, seed: int) -> dict[str, Any]:
    """ids [rows] into a shared embedding [V, H], hidden [rows, H], two weights [H]."""
    random = _Random(case, device, seed)
    vocab = VOCAB if device.type == "cuda" else SMALL_VOCAB
    return {
        "ids": random.ids(case["rows"], vocab),
        "embedding": _embedding(vocab, case["H"], case.torch_dtype, device),
        "hidden": random.rows(case["rows"]),
        "weights": (random.weight(1.0), random.weight(1.0)),
    }
