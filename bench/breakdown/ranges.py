"""Named ranges around the parts of our own loop: for NVTX, for the profiler, for a host clock."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from bench.breakdown.parts import PARTS, PHASES, Key

Mark = Callable[[str, str], AbstractContextManager[None]]
SEPARATOR = "/"
NAMES = {f"{phase}{SEPARATOR}{part}": (phase, part) for phase in PHASES for part in PARTS}


def unmarked(phase: str, part: str) -> AbstractContextManager[None]:
    """No range at all, so that the loop can be timed as it is."""
    return nullcontext()


@contextmanager
def annotated(phase: str, part: str) -> Iterator[None]:
    """A range that the torch profiler and, on a GPU, nsys show under ``phase/part``."""
    name = f"{phase}{SEPARATOR}{part}"
    with torch.profiler.record_function(name):
        if not torch.cuda.is_available():
            yield
            return
        torch.cuda.nvtx.range_push(name)
        try:
            yield
        finally:
            torch.cuda.nvtx.range_pop()


class HostClock:
    """Adds up the host's time in each range; it costs well under a microsecond a range."""

    def __init__(self) -> None:
        self.seconds: dict[Key, float] = defaultdict(float)

    @contextmanager
    def __call__(self, phase: str, part: str) -> Iterator[None]:
        """Time one range."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[phase, part] += time.perf_counter() - began
