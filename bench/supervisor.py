"""Runs cases in a worker process and goes on in a new one when it dies, hangs or loses CUDA.

An illegal address leaves a process unable to use the GPU, a capture that cannot be ended leaves
PyTorch in it, and a fault in a compiler or a library ends the process. Whoever was running then
gets a red row; the case runs again without it.
"""

import json
import queue
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from bench.op import Case, OpSpec
from bench.runner import Row
from bench.worker import Job

WORKER = (sys.executable, "-m", "bench.worker")
START_S = 180.0  # for a worker to import its libraries and measure the machine
SILENCE_S = 600.0  # without an event; flashinfer compiles its top-k for minutes
SLOW_S = 5.0  # a phase that takes longer is named on standard error
GRACE_S = 30.0  # the case under way is given up this long after the time limit


class WorkerFailedError(Exception):
    """The worker ends before it has begun a case."""


@dataclass
class _Item:
    op: OpSpec
    case: Case
    lost: list[Row] = field(default_factory=list)  # of providers that took a worker down

    @property
    def skip(self) -> list[str]:
        return [row.provider for row in self.lost]

    def rows(self, more: Sequence[Row] = ()) -> list[Row]:
        order = list(self.op.providers)
        return sorted((*self.lost, *more), key=lambda row: order.index(row.provider))


class _Worker:
    """One process; ``event()`` waits for its next event."""

    def __init__(self, command: Sequence[str], job: Job) -> None:
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdin is not None
        with self.process.stdin as pipe:
            json.dump(asdict(job), pipe)
        self.lines: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.put(line)
        self.lines.put(None)

    def event(self, seconds: float) -> dict[str, Any]:
        """The next event; ``silent`` when none comes, ``end`` (with why) when none can come."""
        try:
            line = self.lines.get(timeout=seconds)
        except queue.Empty:
            self.process.kill()
            return {"silent": True, "end": f"no progress for {seconds:.0f} s, stopped"}
        if line is not None and line.endswith("\n"):  # a killed process leaves half a line
            return json.loads(line)
        status = self.process.wait()
        if status < 0:
            return {"end": f"the process died of signal {-status}"}
        return {"end": f"exit status {status}, its message is on standard error" if status else ""}

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()


class Supervisor:
    """The cases of one run.

    Attributes:
        machine: what the worker measured on, known once the first case is done.
    """

    def __init__(
        self,
        work: Sequence[tuple[OpSpec, Case]],
        wanted: Sequence[str] = (),
        providers: Sequence[str] = (),
        quick: bool = False,
        seconds: float | None = None,
        command: Sequence[str] = WORKER,
        silence_s: float = SILENCE_S,
    ) -> None:
        self.machine: dict[str, str] = {}
        self._pending = deque(_Item(op, case) for op, case in work)
        self._wanted, self._providers, self._quick = list(wanted), list(providers), quick
        self._until = None if seconds is None else time.monotonic() + seconds
        self._command, self._silence_s = command, silence_s

    @property
    def undone(self) -> int:
        """How many cases the time limit left."""
        return len(self._pending)

    def results(self) -> Iterator[list[Row]]:
        """The rows of each case, as it is done.

        Raises:
            WorkerFailedError: the worker does not come as far as a case.
        """
        while self._pending:
            worker = _Worker(self._command, self._job())
            try:
                yield from self._drain(worker)
            finally:
                worker.stop()
            if self._out_of_time():
                return

    def _left(self) -> float | None:
        return None if self._until is None else self._until - time.monotonic()

    def _out_of_time(self) -> bool:
        left = self._left()
        return left is not None and left <= 0

    def _job(self) -> Job:
        work = [(item.op.name, item.case.id, item.skip) for item in self._pending]
        return Job(self._wanted, work, self._providers, self._quick, self._left())

    def _patience(self, started: bool) -> float:
        most, left = self._silence_s if started else START_S, self._left()
        return most if left is None else min(most, max(left + GRACE_S, 0.0))

    def _drain(self, worker: _Worker) -> Iterator[list[Row]]:
        """Rows until the worker ends; what it was at when it died is out of the way then."""
        started, begun, phase, provider, lost = False, False, "", "", ""
        while True:
            since = time.monotonic()
            event = worker.event(self._patience(started))
            self._tell_if_slow(time.monotonic() - since, phase, provider)
            if "machine" in event:
                started, self.machine = True, event["machine"]
            elif "case" in event:
                begun, phase, provider = True, "", ""
            elif "phase" in event:
                phase, provider = event["phase"]
            elif "rows" in event:
                begun = False
                yield self._pending.popleft().rows([Row(**row) for row in event["rows"]])
            elif "lost" in event:
                lost = event["lost"]
            elif "out_of_time" in event or ("silent" in event and self._out_of_time()):
                return
            elif begun:
                yield from self._blame(phase, provider, lost or event["end"])
                return
            elif self._pending:
                raise WorkerFailedError(lost or event["end"] or "it ended early")
            else:
                return

    def _tell_if_slow(self, seconds: float, phase: str, provider: str) -> None:
        if seconds > SLOW_S and self._pending:
            item = self._pending[0]
            what = f"{item.op.name} {item.case.id}: {phase} {provider}" if phase else "start"
            print(f"{what} took {seconds:.0f} s", file=sys.stderr, flush=True)

    def _blame(self, phase: str, provider: str, why: str) -> Iterator[list[Row]]:
        """Red rows for ``provider``, or for all that ran when it is not known which it was."""
        item = self._pending[0]
        chosen = [n for n in item.op.providers if not self._providers or n in self._providers]
        guilty = [provider] if provider else [n for n in chosen if n not in item.skip]
        note = f"{phase or 'start'}: {why}"
        item.lost += [Row(item.op.name, item.case.id, name, "ERROR", note=note) for name in guilty]
        if len(item.lost) == len(chosen):
            self._pending.popleft()
            yield item.rows()
