"""Times of kernels as a decode step sees them: inside a CUDA graph, inputs not in the L2 cache.

Host timers and single launches measure the host. So each provider's calls are captured into a
graph, one call after the other on different inputs, and the graph's replay is timed with events.
The cache is flushed before each replay, outside the timed region, and every call of a replay
touches its own inputs, or else more than five L2 caches lie between two calls on the same inputs.
Providers take turns, so that clocks and temperature drift over all alike.
"""

import gc
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from bench.op import Thunk

L2_MULTIPLE = 5
MAX_COPIES = 64
MAX_BYTES = 24 << 30  # of rotated inputs

Phase = Callable[[str, str], None]  # told ("capture", provider) or ("replay", "") as they begin


@dataclass(frozen=True)
class Effort:
    """How long to measure. The result is a median in every case; its spread tells what it is worth.

    Attributes:
        replay_us: a replay lasts about this long: the graph's own launch is then below 1%.
        warm_up_s: of replays before the first that counts.
        budget_s: of timed replays for each provider, within ``rounds``, fewest and most.
    """

    replay_us: float
    warm_up_s: float
    budget_s: float
    rounds: tuple[int, int]


FULL = Effort(replay_us=1000.0, warm_up_s=0.05, budget_s=0.25, rounds=(7, 31))
QUICK = Effort(replay_us=400.0, warm_up_s=0.01, budget_s=0.03, rounds=(5, 11))


@dataclass(frozen=True)
class Timing:
    """Microseconds a call, over replays."""

    p20: float
    p50: float
    p80: float


class CaptureBrokenError(Exception):
    """PyTorch could not end a capture; nothing later in this process is to be relied on.

    ``CUDAGraph.capture_end`` raises before it takes the random generator and the allocator out of
    the capture, and ``torch.cuda.graph`` then leaves its stream the current one: the next
    ``randn`` fails, and memory goes to a pool that nobody frees. Only a new process is in order.

    Attributes:
        provider: whose calls were captured.
    """

    provider = ""


def copies_for(touched: float, l2_bytes: int) -> int:
    """How many sets of inputs rotate, if one call touches ``touched`` bytes."""
    wanted = math.ceil(L2_MULTIPLE * l2_bytes / max(touched, 1)) + 1
    return max(1, min(wanted, MAX_COPIES, int(MAX_BYTES // max(touched, 1))))


def l2_bytes() -> int:
    """Size of the current device's L2 cache."""
    return torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size


def release_memory() -> None:
    """Give back what the last case held, graphs' pools included."""
    gc.collect()
    torch.cuda.empty_cache()


def _capture(thunks: Sequence[Thunk]) -> torch.cuda.CUDAGraph:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for thunk in thunks[:2]:  # compiles, and lets libraries allocate their workspaces
            thunk()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    return _record(thunks)


def _record(thunks: Sequence[Thunk]) -> torch.cuda.CUDAGraph:
    """A graph of the calls.

    Raises:
        CaptureBrokenError: the capture could not be ended.
        Exception: a call's own error, if the capture was ended all the same (out of memory, say).
    """
    graph, outputs, failed = torch.cuda.CUDAGraph(), [], None
    try:
        with torch.cuda.graph(graph):
            try:
                outputs += [thunk() for thunk in thunks]  # alive together: each writes its own
            except Exception as error:  # the end of the capture tells what it has done
                failed = error
    except Exception as error:
        cause = failed or error
        raise CaptureBrokenError(f"{type(cause).__name__}: {cause}") from cause
    if failed is not None:
        raise failed
    return graph


def _replay_us(graph: torch.cuda.CUDAGraph) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    graph.replay()
    begin.record()
    graph.replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e3


class _Lane:
    """One provider: its graph and the microseconds of its replays."""

    def __init__(self, thunks: Sequence[Thunk], repeatable: bool, replay_us: float) -> None:
        graph, once = _capture(thunks), 1
        self.replay_us = _replay_us(graph)
        if repeatable and self.replay_us < replay_us:
            once = math.ceil(replay_us / self.replay_us)
            graph = _capture([*thunks] * once)
            self.replay_us = _replay_us(graph)
        self.graph, self.calls = graph, once * len(thunks)
        self.events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def replay(self, flush: "_Flush") -> None:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        flush()
        begin.record()
        self.graph.replay()
        end.record()
        self.events.append((begin, end))

    def timing(self) -> Timing:
        us = sorted(a.elapsed_time(b) * 1e3 / self.calls for a, b in self.events)
        if len(us) < 2:
            return Timing(us[0], us[0], us[0])
        fifths = statistics.quantiles(us, n=5, method="inclusive")
        return Timing(fifths[0], statistics.median(us), fifths[3])


class _Flush:
    """Fills the L2 cache with other data by reading: lines written would have to be written back
    while a provider is timed.
    """

    def __init__(self, l2: int) -> None:
        self.buffer = torch.zeros(L2_MULTIPLE * l2 // 4, dtype=torch.float32, device="cuda")
        self.sink = torch.zeros((), dtype=torch.float32, device="cuda")

    def __call__(self) -> None:
        torch.sum(self.buffer, dim=0, out=self.sink)


def _ignore(phase: str, provider: str) -> None:
    pass


def time_interleaved(
    thunks: Mapping[str, Sequence[Thunk]],
    touched: float,
    effort: Effort = FULL,
    on_phase: Phase = _ignore,
) -> dict[str, Timing | str]:
    """Time of one call for each provider, or why it could not be captured in a graph.

    Args:
        thunks: for each provider the same calls on each of the rotated inputs.
        touched: bytes that one call touches.
        effort: how long to measure.
        on_phase: told what begins, so that a crash has a name.

    Raises:
        CaptureBrokenError: a capture could not be ended; a new process must time the others.
    """
    l2 = l2_bytes()
    lanes: dict[str, _Lane] = {}
    results: dict[str, Timing | str] = {}
    for name, calls in thunks.items():
        on_phase("capture", name)
        repeatable = (len(calls) - 1) * touched >= L2_MULTIPLE * l2
        try:
            lanes[name] = _Lane(calls, repeatable, effort.replay_us)
        except CaptureBrokenError as error:
            error.provider = name
            raise
        except Exception as error:  # whatever a library raises; the others go on
            results[name] = f"{type(error).__name__}: {error}"
    on_phase("replay", "")
    if lanes:
        _warm_up(lanes, effort)
        _take_turns(lanes, _Flush(l2), effort)
    return results | {name: lane.timing() for name, lane in lanes.items()}


def _take_turns(lanes: Mapping[str, _Lane], flush: _Flush, effort: Effort) -> None:
    slowest_s = max(lane.replay_us for lane in lanes.values()) * 1e-6
    fewest, most = effort.rounds
    for _ in range(min(max(int(effort.budget_s / slowest_s), fewest), most)):
        for lane in lanes.values():
            lane.replay(flush)
    torch.cuda.synchronize()


def _warm_up(lanes: Mapping[str, _Lane], effort: Effort) -> None:
    """By the clock on the wall: a count of calls says nothing about clocks and caches."""
    until = time.monotonic() + effort.warm_up_s
    while time.monotonic() < until:
        for lane in lanes.values():
            lane.graph.replay()
        torch.cuda.synchronize()
