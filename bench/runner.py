"""One case of one operation: check every provider, time those that are right, make rows."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

import torch

from bench import roofline, timing
from bench.checks import Verdict
from bench.op import Case, OpSpec, Provider


@dataclass(frozen=True)
class Row:
    """One line of a result table. Times are None unless ``status`` is ``ok`` on a GPU."""

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
    note: str = ""

    @property
    def red(self) -> bool:
        """A result that must fail the run."""
        return self.status in ("FAIL", "ERROR")


def run_case(
    op: OpSpec, case: Case, device: torch.device, wanted: Collection[str] = ()
) -> list[Row]:
    """Rows of all providers, or of those in ``wanted``, in the entry's order."""
    chosen = {n: p for n, p in op.providers.items() if not wanted or n in wanted}
    checked = {n: _check(op, case, device, n, p) for n, p in chosen.items()}
    right = {n: p for n, p in chosen.items() if checked[n].status == "ok"}
    if device.type != "cuda" or not right:
        return list(checked.values())
    times = _times(op, case, device, right)
    return [_timed(row, op, case, times) if row.status == "ok" else row for row in checked.values()]


def _check(op: OpSpec, case: Case, device: torch.device, name: str, provider: Provider) -> Row:
    row = Row(op.name, case.id, name, "ok")
    if reason := provider.missing(case):
        return replace(row, status="absent", note=reason)
    try:
        verdict = _verdict(op, case, device, provider)
    except Exception as error:  # a provider that raises is red, and the others go on
        return replace(row, status="ERROR", note=f"{type(error).__name__}: {error}")
    status = "ok" if verdict.ok else "FAIL"
    return replace(row, status=status, max_error=verdict.error, note=verdict.why)


def _verdict(op: OpSpec, case: Case, device: torch.device, provider: Provider) -> Verdict:
    """Provider and reference each get their own inputs: an operation may work in place."""
    out = provider.make(op.make_inputs(case, device, 0))()
    inputs = op.make_inputs(case, device, 0)
    if provider.check:
        return provider.check(out, inputs)
    return op.check(out, op.reference(inputs))


def _times(
    op: OpSpec, case: Case, device: torch.device, providers: Mapping[str, Provider]
) -> dict[str, timing.Timing | str]:
    touched = op.bytes(case)
    copies = timing.copies_for(touched, timing.l2_bytes())
    inputs = [op.make_inputs(case, device, seed) for seed in range(copies)]
    thunks = {name: [p.make(i) for i in inputs] for name, p in providers.items()}
    return timing.time_interleaved(thunks, touched)


def _timed(row: Row, op: OpSpec, case: Case, times: Mapping[str, timing.Timing | str]) -> Row:
    took, base = times[row.provider], times.get(op.baseline)
    if isinstance(took, str):
        return replace(row, status="ERROR", note=f"not capturable in a CUDA graph: {took}")
    nbytes = (op.providers[row.provider].bytes or op.bytes)(case)
    floor = roofline.measure().floor_us(nbytes, op.flops(case))
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
