"""The process that checks and times: what it cannot survive ends it, not the run.

``python -m bench.worker`` reads one job (:class:`Job` as JSON) from its standard input and writes
events, one JSON object a line, to its standard output: ``machine`` once, then for each case
``case``, ``phase`` (several) and ``rows``; ``out_of_time`` when the deadline left cases undone;
``lost``, with the reason, when the process cannot go on: the CUDA context broke, a capture could
not be ended, or it never got as far as a case. ``bench.supervisor`` is the other side.
"""

import json
import os
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, TextIO

from bench import timing
from bench.environment import pick_device

if TYPE_CHECKING:
    from bench.op import OpSpec


@dataclass(frozen=True)
class Job:
    """What one worker does.

    Attributes:
        wanted: as in :func:`bench.ops.load`.
        work: (operation, case id, providers that are not to run) in order.
        providers: names to run, all if empty.
        quick: :data:`bench.timing.QUICK` instead of ``FULL``.
        seconds: no case begins later than this after the start; None for no limit.
    """

    wanted: list[str]
    work: list[tuple[str, str, list[str]]]
    providers: list[str]
    quick: bool
    seconds: float | None


def main() -> int:
    """Exit status 0 when the job is done or out of time, 1 when the process cannot go on."""
    events = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print must not mix with the events
    try:
        return _work(Job(**json.load(sys.stdin)), events)
    except Exception as error:  # no provider's: those have rows
        traceback.print_exc()
        _send(events, lost=f"{type(error).__name__}: {error}")
        return 1


def _send(events: TextIO, **event: Any) -> None:
    print(json.dumps(event), file=events, flush=True)


def _work(job: Job, events: TextIO) -> int:
    until = None if job.seconds is None else time.monotonic() + job.seconds
    device = pick_device()
    from bench import ops, roofline
    from bench.runner import CaseRun, ContextLostError

    loaded, broken = ops.load(job.wanted)
    reasons = [f"bench/ops/{entry.stem}.py: {entry.why}" for entry in broken]
    _send(events, machine=roofline.describe_with_peaks(device))
    for name, case_id, skip in job.work:
        if until is not None and time.monotonic() > until:
            _send(events, out_of_time=True)
            return 0
        op = _operation(name, loaded, reasons)
        case = next(c for c in (*op.cases, *op.small_cases) if c.id == case_id)
        wanted = [p for p in job.providers or op.providers if p in op.providers and p not in skip]
        _send(events, case=[name, case_id])
        run = CaseRun(
            op,
            case,
            device,
            wanted,
            timing.QUICK if job.quick else timing.FULL,
            lambda phase, provider: _send(events, phase=[phase, provider]),
        )
        try:
            _send(events, rows=[asdict(row) for row in run.rows()])
        except ContextLostError as error:
            _send(events, lost=f"broke the CUDA context: {error}")
            return 1
        except timing.CaptureBrokenError as error:
            _send(events, lost=f"not capturable in a CUDA graph: {error}")
            return 1
        if device.type == "cuda":
            timing.release_memory()
    return 0


def _operation(name: str, loaded: Sequence["OpSpec"], reasons: Sequence[str]) -> "OpSpec":
    """The operation of that name; a library may have loaded in the parent and not here."""
    for op in loaded:
        if op.name == name:
            return op
    raise LookupError(f"no operation {name} in the worker process; {'; '.join(reasons)}")


if __name__ == "__main__":
    sys.exit(main())
