"""What an operation declares to the harness: ``bench/ops/<stem>.py`` has a tuple ``OPS`` of these.

The order of work is fixed: inputs, check, time, report. An entry only declares.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from bench.checks import Verdict

Inputs = Any  # what make_inputs returns; opaque to the harness
Thunk = Callable[[], Any]  # one call of an implementation; returns its outputs

DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "fp8": torch.float8_e4m3fn,
    "int8": torch.int8,
}


class Case:
    """One problem size with a readable id: ``Case(rows=16, V=32768, dtype="bf16")``.

    Parameters that are words stand in the id as they are, numbers with their name in front:
    ``rows16-V32768-bf16``.
    """

    def __init__(self, **params: int | float | str) -> None:
        self.params = params
        self.id = "-".join(v if isinstance(v, str) else f"{k}{v}" for k, v in params.items())

    def __getitem__(self, name: str) -> Any:
        return self.params[name]

    def __repr__(self) -> str:
        return self.id

    @property
    def torch_dtype(self) -> torch.dtype:
        """The parameter ``dtype`` as torch's type."""
        return DTYPES[self["dtype"]]


def anywhere(case: Case) -> str | None:
    """No reason against a provider: it runs on every device and in every case."""
    return None


@dataclass(frozen=True)
class Provider:
    """An implementation of an operation: ours, or one to compare with.

    ``make`` does all preparation (layouts, workspace, planning, outputs filled with NaN) and
    returns the thunk that is timed; a CUDA graph must be able to capture it. ``missing`` returns
    why the provider cannot run a case, or None. A provider that computes something else for context
    (the full vocabulary, say) brings its own ``check`` and ``bytes``; having ``bytes`` of its own
    marks it as no rival of the others.
    """

    make: Callable[[Inputs], Thunk]
    missing: Callable[[Case], str | None] = anywhere
    check: Callable[[Any, Inputs], Verdict] | None = None
    bytes: Callable[[Case], float] | None = None


@dataclass(frozen=True)
class Tuning:
    """Launch configurations to sweep: ``configs(case)``, and a thunk for one of them.

    ``repr`` of a configuration is printed as the row for the launch table.
    """

    configs: Callable[[Case], Sequence[Any]]
    make: Callable[[Inputs, Any], Thunk]


@dataclass(frozen=True)
class OpSpec:
    """One operation.

    Attributes:
        cases: timed on a GPU.
        small_cases: run under Triton's interpreter when there is no GPU (correctness only).
        make_inputs: ``(case, device, seed)``; equal seeds give equal inputs. Called up to 64 times
            a case, for inputs that rotate past the L2 cache.
        reference: what ``check`` compares with, from inputs that no provider has touched: usually
            the fp64 truth and PyTorch's result in the case's own type.
        check: ``(outputs, reference) -> Verdict``.
        providers: by name; ``baseline`` names the one that speedups are against.
        bytes, flops: the least that the operation must move (each input read once, each output
            written once) and compute. They give the floor.
        axes: parameters to plot time against.
    """

    name: str
    cases: Sequence[Case]
    small_cases: Sequence[Case]
    make_inputs: Callable[[Case, torch.device, int], Inputs]
    reference: Callable[[Inputs], Any]
    check: Callable[[Any, Any], Verdict]
    providers: Mapping[str, Provider]
    baseline: str
    bytes: Callable[[Case], float]
    flops: Callable[[Case], float]
    axes: tuple[str, ...] = ()
    tuning: Tuning | None = None

    def __post_init__(self) -> None:
        if self.baseline not in self.providers:
            raise ValueError(f"{self.name}: baseline {self.baseline!r} is not a provider")
        ids = [case.id for case in (*self.cases, *self.small_cases)]
        if len(set(ids)) != len(ids):
            raise ValueError(f"{self.name}: two cases have one id in {ids}")
