"""What the entries share to declare their providers."""

import importlib.util
from collections.abc import Callable
from typing import Any

import torch

from bench.op import Case

SHAPES_PER_FUNCTION = 1000


def needs(package: str) -> Callable[[Case], str | None]:
    """``missing`` of a provider that needs a GPU and the optional package ``package``."""

    def missing(case: Case) -> str | None:
        if not torch.cuda.is_available():
            return "needs a GPU"
        found = importlib.util.find_spec(package) is not None
        return None if found else f"{package} is not installed"

    return missing


def needs_gpu(case: Case) -> str | None:
    """``missing`` of a provider that only makes sense on a GPU."""
    return None if torch.cuda.is_available() else "needs a GPU"


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """``torch.compile`` for the very shapes of each call, however many other shapes ran before."""
    import torch._dynamo

    torch._dynamo.config.recompile_limit = SHAPES_PER_FUNCTION
    torch._dynamo.config.accumulated_recompile_limit = SHAPES_PER_FUNCTION
    return torch.compile(function, dynamic=False, fullgraph=True)


def poisoned(*shape: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """An output that a kernel has to fill: NaN, or -1 for integers."""
    value = float("nan") if dtype.is_floating_point else -1
    return torch.full(shape, value, dtype=dtype, device=device)
