"""Kernels, launches and idle time of a decode round, from a trace of SGLang's profile endpoint."""

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.serving.servers import Server
from bench.serving.trace_file import ON_GPU, ON_HOST, Event, TraceError, read_events, record


@dataclass(frozen=True)
class RoundProfile:
    """One decode round, averaged over the rounds of a trace.

    Attributes:
        rounds: how many were averaged.
        busy_ms: time in which at least one kernel or copy ran.
        gaps_ms: time in which nothing ran between two kernels of one graph launch.
        traced_ms: a round's length while it was traced; tracing slows the host.
        kernels: kernels, copies and fills that ran, in graphs or not.
        graphs: graph launches.
        launches: kernel launches outside graphs.
        copies: copies and fills issued outside graphs.
        waits: host calls that wait for the GPU.
        by_kernel: name to (times a round, µs a round), the longest first.
    """

    rounds: int
    busy_ms: float
    gaps_ms: float
    traced_ms: float
    kernels: float
    graphs: float
    launches: float
    copies: float
    waits: float
    by_kernel: dict[str, tuple[float, float]]


def profile(
    server: Server, texts: Sequence[Sequence[int]], folder: Path, rounds: int
) -> RoundProfile:
    """Trace the first ``rounds`` decode rounds of a batch; ``folder`` is for this trace alone.

    Raises:
        TraceError: no trace came, or no round can be made out in it.
        RequestFailedError: the server failed.
    """
    return analyse(traced(server, texts, folder, rounds), rounds)


def traced(
    server: Server, texts: Sequence[Sequence[int]], folder: Path, rounds: int
) -> list[Event]:
    """Events of the first ``rounds`` decode rounds of a batch; raises as :func:`profile` does."""
    # What the host does is not traced: that would slow it, and with it the round.
    path = record(
        server.url,
        texts,
        folder,
        rounds=rounds,
        new_tokens=answer_tokens(rounds),
        activities=["GPU"],
    )
    return read_events(path)


def answer_tokens(rounds: int) -> int:
    """Tokens of answers that last for the traced rounds, at up to ten tokens a round."""
    return 10 * rounds


def analyse(events: Iterable[Event], rounds: int) -> RoundProfile:
    """Average a trace of about ``rounds`` decode rounds.

    The window goes from the first to the last run of a kernel that runs once a round, so it holds
    whole rounds.

    Raises:
        TraceError: no kernel recurs once a round.
    """
    events = list(events)
    gpu = sorted((e for e in events if e.get("cat") in ON_GPU), key=lambda e: e["ts"])
    start, end, count = _window(gpu, rounds)
    inside = [e for e in gpu if start <= e["ts"] < end]
    calls = Counter(e["name"] for e in events if e.get("cat") in ON_HOST and start <= e["ts"] < end)
    by_kernel: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for event in inside:
        by_kernel[event["name"]][0] += 1 / count
        by_kernel[event["name"]][1] += event["dur"] / count
    longest = sorted(by_kernel.items(), key=lambda item: -item[1][1])
    busy, gaps = _busy_us(inside)
    return RoundProfile(
        rounds=count,
        busy_ms=busy / count / 1e3,
        gaps_ms=gaps / count / 1e3,
        traced_ms=(end - start) / count / 1e3,
        kernels=len(inside) / count,
        graphs=_sum(calls, "GraphLaunch") / count,
        launches=_sum(calls, "LaunchKernel") / count,
        copies=_sum(calls, "Memcpy", "Memset") / count,
        waits=_sum(calls, "Synchronize") / count,
        by_kernel={name: (times, us) for name, (times, us) in longest},
    )


def _sum(calls: Counter[str], *parts: str) -> int:
    return sum(count for name, count in calls.items() if any(part in name for part in parts))


def _busy_us(events: Sequence[Event]) -> tuple[float, float]:
    """Time in which something ran, and idle time between kernels of the same graph launch."""
    busy = gaps = until = 0.0
    launch: Any = None
    for event in events:
        begin, finish = max(event["ts"], until), event["ts"] + event["dur"]
        this = event.get("args", {}).get("correlation")
        if this is not None and this == launch:
            gaps += begin - until
        if finish > begin:
            busy += finish - begin
            until, launch = finish, this
    return busy, gaps


def _window(gpu: Sequence[Event], rounds: int) -> tuple[float, float, int]:
    """Begin, end and number of whole rounds, by the most regular kernel that recurs each round."""
    places: dict[str, list[float]] = defaultdict(list)
    for event in gpu:
        places[event["name"]].append(event["ts"])
    allowed = max(1, rounds // 10)
    anchors = [t for t in places.values() if abs(len(t) - rounds) <= allowed and len(t) > 2]
    if not anchors:
        raise TraceError(
            f"no kernel runs about {rounds} times in a trace of {len(gpu)} GPU events: not one"
            " decode round after the other"
        )
    # What runs as often, but all at once, belongs to something else than decoding.
    longest = max(times[-1] - times[0] for times in anchors)
    anchors = [times for times in anchors if times[-1] - times[0] > longest / 2]
    best = min(anchors, key=_irregularity)
    return best[0], best[-1], len(best) - 1


def _irregularity(times: Sequence[float]) -> float:
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    mean = sum(gaps) / len(gaps)
    return max(abs(gap - mean) for gap in gaps) / mean
