"""Measure the eager loop: untraced for the length of a cycle, traced for its parts.

Times come first, for all vocabularies; traces follow, which a busy host does not distort: they tell
what the GPU does, not when.
"""

import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity

from bench.breakdown.eager_draft import DraftHead
from bench.breakdown.eager_labels import eager_labels, graph_labels, host_labels
from bench.breakdown.eager_loop import EagerLoop
from bench.breakdown.parts import Key, Split
from bench.breakdown.ranges import HostClock, annotated
from bench.breakdown.timeline import busy, gpu_events
from bench.serving.trace_file import Event, read_events

WARM_UPS = 3
TRACED = 3


@dataclass(frozen=True)
class Captured:
    """One cycle as a CUDA graph.

    Attributes:
        graph: the cycle.
        accepted: (B, S + 1), where the graph leaves the accepted tokens.
        cycle_us: median length.
    """

    graph: torch.cuda.CUDAGraph
    accepted: Tensor
    cycle_us: float


@dataclass(frozen=True)
class Timed:
    """A loop's times with one draft head.

    Attributes:
        head: kept, because a captured graph reads it.
        cycle_us: median length, launched kernel by kernel.
        host_us: mean time in which the host issues each part.
        captured: the same as one graph, if that was asked for.
    """

    head: DraftHead
    cycle_us: float
    host_us: dict[Key, float]
    captured: Captured | None


def time_cycles(loop: EagerLoop, vocab: int, cycles: int, graphs: bool) -> Timed:
    """Times of ``cycles`` cycles each, with a draft head of ``vocab`` rows; nothing is traced.

    Args:
        loop: gets that head.
        vocab: rows of it.
        cycles: how many.
        graphs: whether to capture a cycle, too; needs a GPU.
    """
    head = loop.draft.head = loop.make_head(vocab)
    with torch.inference_mode():
        for _ in range(WARM_UPS):
            loop.cycle()
        host_us = _host_us(loop, cycles)
        cycle_us = _cycle_us(loop.cycle, cycles)
        return Timed(head, cycle_us, host_us, _capture(loop, cycles) if graphs else None)


def split_cycles(loop: EagerLoop, timed: Timed, traces: Path | None) -> list[Split]:
    """Splits of the loop launched kernel by kernel and, if it was captured, as one graph a cycle.

    Args:
        loop: that was timed.
        timed: its times.
        traces: folder for the traces, to be opened in Perfetto; none are kept without.

    Raises:
        CaptureError: the graph's kernels are not those of the eager loop.
    """
    loop.draft.head, vocab = timed.head, timed.head.vocab
    with torch.inference_mode():
        events, traced_us = _trace(lambda: loop.cycle(annotated), traces, f"eager-{vocab}")
    cycle_us = timed.cycle_us
    if torch.cuda.is_available():
        kernels, labels = eager_labels(events)
    else:
        # The ranges are the host's own, which tracing stretches together with the cycle.
        kernels, labels, cycle_us = *host_labels(events), traced_us
    steps = loop.spec.steps
    lengths = (cycle_us, traced_us)
    splits = [_split("eager", vocab, steps, lengths, kernels, labels, events, timed.host_us)]
    captured = timed.captured
    if captured:
        replay = partial(_replay, captured.graph, captured.accepted)
        events, traced_us = _trace(replay, traces, f"graph-{vocab}")
        kernels, labels = _graphed(kernels, labels, events)
        lengths = (captured.cycle_us, traced_us)
        name = "eager, one CUDA graph"
        splits.append(_split(name, vocab, steps, lengths, kernels, labels, events, {}))
    return splits


def _capture(loop: EagerLoop, cycles: int) -> Captured:
    graph = torch.cuda.CUDAGraph()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        loop.device_work()
    torch.cuda.current_stream().wait_stream(side)
    with torch.cuda.graph(graph):
        accepted = loop.device_work()
    replay = partial(_replay, graph, accepted)
    for _ in range(WARM_UPS):
        replay()
    return Captured(graph, accepted, _cycle_us(replay, cycles))


def _replay(graph: torch.cuda.CUDAGraph, accepted: Tensor) -> list[list[int]]:
    graph.replay()
    return accepted.tolist()


def _graphed(
    eager_kernels: Sequence[Event], eager_keys: Sequence[Key], events: Sequence[Event]
) -> tuple[list[Event], list[Key]]:
    kernels = gpu_events(events)
    return kernels, graph_labels(eager_kernels, eager_keys, kernels)


def _cycle_us(cycle: Callable[[], object], cycles: int) -> float:
    lengths = []
    for _ in range(cycles):
        began = time.perf_counter()
        cycle()
        lengths.append(time.perf_counter() - began)
    return 1e6 * median(lengths)


def _host_us(loop: EagerLoop, cycles: int) -> dict[Key, float]:
    clock = HostClock()
    for _ in range(cycles):
        loop.cycle(clock)
    return {key: 1e6 * seconds / cycles for key, seconds in clock.seconds.items()}


def _trace(
    cycle: Callable[[], object], folder: Path | None, name: str
) -> tuple[list[Event], float]:
    """Events of ``TRACED`` cycles, and the length of one of them in microseconds."""
    kinds = [ProfilerActivity.CPU]
    kinds += [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
    with torch.profiler.profile(activities=kinds) as profiler:
        cycle()  # the profiler's own start is slow
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        with torch.profiler.record_function("cycles"):
            began = time.perf_counter()
            for _ in range(TRACED):
                cycle()
            length = time.perf_counter() - began
    with tempfile.TemporaryDirectory() as scratch:
        # The suffix decides whether the profiler compresses what it writes.
        path = folder / f"{name}.json.gz" if folder else Path(scratch) / "trace.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(path))
        events = read_events(path)
    return _within(events), 1e6 * length / TRACED


def _within(events: Iterable[Event]) -> list[Event]:
    """What began inside the range "cycles", GPU work of earlier launches left out."""
    events = [e for e in events if "ts" in e]
    outer = next(e for e in events if e["name"] == "cycles" and e.get("cat") == "user_annotation")
    return [e for e in events if outer["ts"] <= e["ts"] <= outer["ts"] + outer["dur"]]


def _split(
    name: str,
    vocab: int,
    steps: int,
    lengths: tuple[float, float],
    kernels: Sequence[Event],
    labels: Sequence[Key],
    events: Sequence[Event],
    host_us: dict[Key, float],
) -> Split:
    gpu_us: dict[Key, float] = defaultdict(float)
    for key, us in busy(kernels, labels).items():
        gpu_us[key] += us / TRACED
    calls = [e for e in events if "Launch" in e["name"] and e.get("cat", "").startswith("cuda_")]
    cycle_us, traced_us = lengths
    return Split(
        implementation=name,
        vocab=vocab,
        steps=steps,
        cycles=TRACED,
        cycle_us=cycle_us,
        gpu_us=dict(gpu_us),
        host_us=host_us,
        kernels=len(kernels) / TRACED,
        launches=len(calls) / TRACED,
        traced_cycle_us=traced_us,
    )
