"""The process that checks and times: a broken CUDA context or a crash ends it, not the run.

``python -m bench.worker`` reads one job (:class:`Job` as JSON) from its standard input and writes
events, one JSON object a line, to its standard output: ``machine`` once, then for each case
``case``, ``phase`` (several) and ``rows``; ``lost`` when the CUDA context broke, ``out_of_time``
when the deadline left cases undone. ``bench.supervisor`` is the other side.
"""

import json
import os
import sys
import time
from dataclasses import asdict, dataclass
from typing import Any, TextIO

from bench import timing
from bench.environment import pick_device


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
    """Exit status 0 when the job is done or out of time, 1 after a broken CUDA context."""
    events = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print must not mix with the events
    return _work(Job(**json.load(sys.stdin)), events)


def _send(events: TextIO, **event: Any) -> None:
    print(json.dumps(event), file=events, flush=True)


def _work(job: Job, events: TextIO) -> int:
    until = None if job.seconds is None else time.monotonic() + job.seconds
    device = pick_device()
    from bench import ops, roofline
    from bench.runner import CaseRun, ContextLostError

    by_name = {op.name: op for op in ops.load(job.wanted)[0]}
    _send(events, machine=roofline.describe_with_peaks(device))
    for name, case_id, skip in job.work:
        if until is not None and time.monotonic() > until:
            _send(events, out_of_time=True)
            return 0
        op = by_name[name]
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
            _send(events, lost=str(error))
            return 1
        if device.type == "cuda":
            timing.release_memory()
    return 0


if __name__ == "__main__":
    sys.exit(main())
