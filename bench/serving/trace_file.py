"""Torch profiler traces: have a server write one, and read it."""

import gzip
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.serving import client

ON_GPU = frozenset(("kernel", "gpu_memcpy", "gpu_memset"))
ON_HOST = frozenset(("cuda_runtime", "cuda_driver"))
_TRACE_SECONDS = 30.0
_POLL_SECONDS = 0.2
Event = dict[str, Any]


class TraceError(RuntimeError):
    """No trace, or none of decode rounds."""


def record(
    url: str,
    texts: Sequence[Sequence[int]],
    folder: Path,
    *,
    rounds: int,
    new_tokens: int,
    activities: Sequence[str],
) -> Path:
    """Trace the first ``rounds`` batches of an answer: mostly decode rounds, behind the prefill.

    The profile starts before the request, so the trace begins with the prefill, which is mostly
    cached; it ends by itself.

    Args:
        url: of the server.
        texts: prompts of one batch, as token ids.
        folder: for this trace alone.
        rounds: forward batches to trace.
        new_tokens: of the answers; enough for all of them.
        activities: ``GPU``, and ``CPU`` for what the host does, which slows it.

    Raises:
        TraceError: no trace came.
        RequestFailedError: the server failed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    body = {"output_dir": str(folder.absolute()), "num_steps": rounds, "with_stack": False}
    client.post(url, "/start_profile", body | {"activities": list(activities)}, timeout=60)
    client.generate(url, texts, new_tokens)
    return _newest(folder)


def _newest(folder: Path) -> Path:
    end = time.monotonic() + _TRACE_SECONDS
    while time.monotonic() < end:
        traces = sorted(folder.rglob("*.trace.json.gz"), key=lambda path: path.stat().st_mtime)
        if traces and _is_complete(traces[-1]):
            return traces[-1]
        time.sleep(_POLL_SECONDS)
    raise TraceError(f"no trace in {folder} after {_TRACE_SECONDS:.0f} s")


def _is_complete(path: Path) -> bool:
    """Whether a compressed file is whole: its last block says how long it is."""
    size = path.stat().st_size
    time.sleep(_POLL_SECONDS)
    if not 0 < size == path.stat().st_size:
        return False
    try:
        with gzip.open(path) as file:
            while file.read(1 << 24):
                pass
    except (EOFError, OSError):
        return False
    return True


def read_events(path: Path) -> list[Event]:
    """Events of a trace, compressed or not.

    Raises:
        TraceError: the file is no trace.
    """
    opened = gzip.open if path.suffix == ".gz" else open
    try:
        with opened(path, "rt", encoding="utf-8", errors="replace") as file:
            return json.load(file)["traceEvents"]
    except (json.JSONDecodeError, KeyError, EOFError, gzip.BadGzipFile) as error:
        raise TraceError(f"{path} is no torch profiler trace: {error}") from None
