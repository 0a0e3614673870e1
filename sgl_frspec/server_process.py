"""A server as a child process: start it, wait until it answers, stop it with all its children."""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import IO

from sgl_frspec.serve import ServerCommand

_POLL_SECONDS = 0.5
_STOP_SECONDS = 15.0
_LOG_LINES_SHOWN = 25


_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)


class ServerError(RuntimeError):
    """The server ended or did not get ready; the message carries the end of its log."""


class ServerProcess:
    """A running server. A context manager: leaving it stops every process the server started.

    The server leads a process group of its own, so that its workers go with it, and so that an
    interrupt from the keyboard reaches the caller first. On Linux it also ends when the thread that
    started it does, even if that is killed.
    """

    def __init__(self, command: ServerCommand, url: str, log: Path) -> None:
        """Start ``command``, whose output goes to ``log``; it is expected to listen at ``url``."""
        self.url = url
        self.log = log
        self._log_file: IO[bytes] = log.open("wb")
        self._started = time.monotonic()
        self._process = subprocess.Popen(
            command.argv,
            env=command.environment,
            stdin=subprocess.DEVNULL,
            stdout=self._log_file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=_end_with_parent,
        )

    @property
    def seconds(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._started

    def wait_until_ready(
        self, timeout: float, on_progress: Callable[[float, str], None] | None = None
    ) -> None:
        """Return as soon as ``/health`` answers 200.

        Args:
            timeout: seconds from the server's start.
            on_progress: called twice a second with the seconds passed and the last log line.

        Raises:
            ServerError: it ended, or is not ready in time.
        """
        while not self._is_healthy():
            if self._process.poll() is not None:
                raise ServerError(
                    f"the server ended with status {self._process.returncode} before it was "
                    f"ready:\n{self.log_tail()}"
                )
            if self.seconds > timeout:
                raise ServerError(
                    f"the server is not ready after {timeout:.0f} s:\n{self.log_tail()}"
                )
            if on_progress:
                on_progress(self.seconds, self.log_tail(1))
            time.sleep(_POLL_SECONDS)

    def log_tail(self, lines: int = _LOG_LINES_SHOWN) -> str:
        """The last lines of the log that say something."""
        with self.log.open(encoding="utf-8", errors="replace") as log:
            return "".join(deque((line for line in log if line.strip()), maxlen=lines)).rstrip()

    def stop(self) -> None:
        """End the whole process group: first politely, then not. Safe to call again."""
        for sign in (signal.SIGTERM, signal.SIGKILL):
            if not self.processes():
                break
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, sign)
            self._wait_for_end(_STOP_SECONDS)
        self._process.wait()
        self._log_file.close()

    def _is_healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5) as answer:
                return answer.status == 200
        except (urllib.error.URLError, OSError):
            return False

    def processes(self) -> list[int]:
        """Processes of the group that still run. Ended ones that nobody reaped do not count."""
        self._process.poll()
        members = []
        for stat in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                state, _, group = stat.read_text().rpartition(")")[2].split()[:3]
                if int(group) == self._process.pid and state not in "ZX":
                    members.append(int(stat.parent.name))
        return members

    def _wait_for_end(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end and self.processes():
            time.sleep(0.05)

    def __enter__(self) -> "ServerProcess":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()


def _end_with_parent() -> None:
    if sys.platform == "linux":
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
