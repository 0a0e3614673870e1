"""Measurements of one machine take turns, and wait until no other one starts its servers."""

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

LOCK = Path("/tmp/frspec-bench.lock")


class Machine:
    """This process's place among those that measure on the machine."""

    def __init__(self, file: IO[str]) -> None:
        self._file = file

    def measure(self) -> None:
        """Wait until nothing else starts or measures; it is this process's turn until it ends."""
        # The lock is given up in between: two that both wait to go on would wait for ever.
        fcntl.flock(self._file, fcntl.LOCK_UN)
        fcntl.flock(self._file, fcntl.LOCK_EX)


@contextmanager
def starting(path: Path = LOCK) -> Iterator[Machine]:
    """Others may start beside this block, but none measures until :meth:`Machine.measure`."""
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        yield Machine(file)
