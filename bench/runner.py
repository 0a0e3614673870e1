"""One case of one operation: check every provider, time those that are right, make rows."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from bench import roofline, timing
from bench.checks import Verdict
from bench.op import Case, OpSpec, Provider, Thunk


@dataclass(frozen=True)
class Row:
    """One line of a result table. Times are None unless ``status`` is ``ok`` on a GPU.

    A ``context`` row is of a provider that computes something else: no rival of the others.
    """

    op: str
    case: str
    provider: str
    status: str  # ok | FAIL (wrong result) | ERROR (raised) | absent (cannot run here)
    us_p50: float | None = None
    us_p20: float | None = None
    us_p80: float | None = None
    gb_s: float | None = None
    pct_peak: float | None = None
    speedup: float | None = None
    max_error: float | None = None
    floor_us: float | None = None
    context: bool = False
    note: str = ""

    @property
    def red(self) -> bool:
        """A result that must fail the run."""
        return self.status in ("FAIL", "ERROR")


class ContextLostError(Exception):
    """After this error no CUDA call of the process works any more."""


def explain(error: Exception) -> str:
    """Type and message of ``error``, for a row's note."""
    return f"{type(error).__name__}: {error}"


@dataclass(frozen=True)
class CaseRun:
    """How to run one case.

    Attributes:
        wanted: names of the providers, all if empty.
        effort: how long to measure.
        on_phase: told (phase, provider or "" for all) as each phase begins.
    """

    op: OpSpec
    case: Case
    device: torch.device
    wanted: Collection[str] = ()
    effort: timing.Effort = timing.FULL
    on_phase: timing.Phase = lambda phase, provider: None

    def rows(self) -> list[Row]:
        """One row a provider, in the entry's order.

        Raises:
            ContextLostError: a provider broke the CUDA context; ``on_phase`` had its name.
            CaptureBrokenError: so did one whose calls cannot be captured in a graph.
        """
        op = self.op
        chosen = {n: p for n, p in op.providers.items() if not self.wanted or n in self.wanted}
        reference = _Reference(self)
        checked = {name: self._check(name, p, reference) for name, p in chosen.items()}
        right = {name: p for name, p in chosen.items() if checked[name].status == "ok"}
        if self.device.type != "cuda" or not right:
            return list(checked.values())
        del reference
        times = self._times(right)
        return [self._timed(row, times) if row.status == "ok" else row for row in checked.values()]

    def inputs(self, seed: int) -> Any:
        """New inputs; equal seeds give equal ones."""
        return self.op.make_inputs(self.case, self.device, seed)

    def _check(self, name: str, provider: Provider, reference: "_Reference") -> Row:
        self.on_phase("check", name)
        row = Row(self.op.name, self.case.id, name, "ok", context=provider.bytes is not None)
        try:
            if reason := provider.missing(self.case):
                return replace(row, status="absent", note=reason)
            verdict = self._verdict(provider, reference)
        except Exception as error:  # a provider that raises is red, and the others go on
            _raise_if_lost(self.device, error)
            return replace(row, status="ERROR", note=explain(error))
        status = "ok" if verdict.ok else "FAIL"
        return replace(row, status=status, max_error=verdict.error, note=verdict.why)

    def _verdict(self, provider: Provider, reference: "_Reference") -> Verdict:
        """Provider and reference each get their own inputs: an operation may work in place."""
        out = provider.make(self.inputs(0))()
        if provider.check:
            return provider.check(out, self.inputs(0))
        return self.op.check(out, reference.value())

    def _times(self, providers: Mapping[str, Provider]) -> dict[str, timing.Timing | str]:
        touched = self.op.bytes(self.case)
        copies = timing.copies_for(touched, timing.l2_bytes())
        self.on_phase("inputs", "")  # a failure here is no provider's
        inputs = [self.inputs(seed) for seed in range(copies)]
        thunks: dict[str, Sequence[Thunk]] = {}
        failed: dict[str, timing.Timing | str] = {}
        for name, provider in providers.items():
            self.on_phase("prepare", name)
            try:
                thunks[name] = [provider.make(i) for i in inputs]
            except Exception as error:  # out of memory for that many inputs, say
                _raise_if_lost(self.device, error)
                failed[name] = explain(error)
        times = timing.time_interleaved(thunks, touched, self.effort, self.on_phase)
        for took in times.values():
            if isinstance(took, str):
                _raise_if_lost(self.device, RuntimeError(took))
        return failed | times

    def _timed(self, row: Row, times: Mapping[str, timing.Timing | str]) -> Row:
        took, base = times[row.provider], times.get(self.op.baseline)
        if isinstance(took, str):
            return replace(row, status="ERROR", note=f"not timed: {took}")
        nbytes = (self.op.providers[row.provider].bytes or self.op.bytes)(self.case)
        floor = roofline.measure().floor_us(nbytes, self.op.flops(self.case))
        return replace(
            row,
            us_p50=took.p50,
            us_p20=took.p20,
            us_p80=took.p80,
            gb_s=nbytes / took.p50 / 1e3,
            pct_peak=100 * floor / took.p50,
            speedup=base.p50 / took.p50 if isinstance(base, timing.Timing) else None,
            floor_us=floor,
        )


class _Reference:
    """The operation's reference, computed when a check first asks for it."""

    def __init__(self, run: CaseRun) -> None:
        self._run = run
        self._value: Any = None

    def value(self) -> Any:
        if self._value is None:
            self._value = self._run.op.reference(self._run.inputs(0))
        return self._value


def _raise_if_lost(device: torch.device, error: Exception) -> None:
    """Tell a call that failed from a broken context, in which everything else would fail too."""
    if device.type != "cuda":
        return
    try:
        torch.cuda.synchronize()
    except Exception as lost:
        raise ContextLostError(explain(error)) from lost
