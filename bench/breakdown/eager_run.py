"""Measure the eager loop: untraced for the length of a cycle, traced for its parts."""

import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import median

import torch
from torch.profiler import ProfilerActivity

from bench.breakdown.eager_loop import EagerLoop
from bench.breakdown.parts import UNKNOWN, Key, Split
from bench.breakdown.ranges import NAMES, HostClock, annotated, unmarked
from bench.breakdown.timeline import Ranges, busy, gpu_events, launch_times
from bench.serving.trace_file import Event, read_events

WARM_UPS = 3
TRACED = 3
_RESYNC = 24  # kernels that a library may use more or less of at one place
NOWHERE: Key = ("between", UNKNOWN)


class CaptureError(RuntimeError):
    """A graph that runs other kernels than the loop it was captured from."""


def measure(loop: EagerLoop, cycles: int, graphs: bool, traces: Path | None) -> list[Split]:
    """The loop launched kernel by kernel and, with ``graphs``, as one CUDA graph a cycle.

    Args:
        loop: with its draft vocabulary set.
        cycles: timed for a median.
        graphs: whether to capture; needs a GPU.
        traces: folder for the traces, to be opened in Perfetto; none are kept without.

    Raises:
        CaptureError: the graph's kernels are not those of the eager loop.
    """
    with torch.inference_mode():
        for _ in range(WARM_UPS):
            loop.cycle()
        host_us = _host_us(loop, cycles)
        cycle_us = _cycle_us(loop.cycle, cycles)
        name = f"eager-{loop.draft_vocab}"
        events, traced_us = _trace(lambda: loop.cycle(annotated), traces, name)
        if torch.cuda.is_available():
            kernels, labels = eager_labels(events)
        else:
            # The ranges are the host's own, which tracing stretches together with the cycle.
            kernels, labels, cycle_us = *host_labels(events), traced_us
        first = _split("eager", loop, cycle_us, traced_us, kernels, labels, events, host_us)
        if not graphs:
            return [first]
        return [first, _graphed(loop, cycles, kernels, labels, traces)]


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


def eager_labels(events: Sequence[Event]) -> tuple[list[Event], list[Key]]:
    """GPU events, and for each the part in whose range its launch was."""
    calls, ranges = launch_times(events), Ranges(events, NAMES)
    kernels = gpu_events(events)
    labels = []
    for kernel in kernels:
        call = calls.get(kernel.get("args", {}).get("correlation"))
        name = ranges.at(call) if call else None
        labels.append(NAMES[name] if name else NOWHERE)
    return kernels, labels


def host_labels(events: Sequence[Event]) -> tuple[list[Event], list[Key]]:
    """Without a GPU the operations run where they are issued: the ranges are the parts."""
    ranges = [e for e in events if e.get("cat") == "user_annotation" and e["name"] in NAMES]
    ranges.sort(key=lambda e: e["ts"])
    return ranges, [NAMES[e["name"]] for e in ranges]


def _graphed(
    loop: EagerLoop,
    cycles: int,
    eager_kernels: Sequence[Event],
    eager_keys: Sequence[Key],
    traces: Path | None,
) -> Split:
    graph = torch.cuda.CUDAGraph()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        loop.device_work()
    torch.cuda.current_stream().wait_stream(side)
    with torch.cuda.graph(graph):
        accepted = loop.device_work(unmarked)

    def cycle() -> None:
        graph.replay()
        accepted.tolist()

    for _ in range(WARM_UPS):
        cycle()
    cycle_us = _cycle_us(cycle, cycles)
    events, traced_us = _trace(cycle, traces, f"graph-{loop.draft_vocab}")
    kernels = gpu_events(events)
    labels = graph_labels(eager_kernels, eager_keys, kernels)
    return _split("eager, one CUDA graph", loop, cycle_us, traced_us, kernels, labels, events, {})


def graph_labels(
    eager_kernels: Sequence[Event], eager_keys: Sequence[Key], kernels: Sequence[Event]
) -> list[Key]:
    """Parts of a graph's kernels: those of the same kernels, launched one by one in that order.

    A graph's kernels share its one launch, so no range tells them apart. Matrix libraries may
    choose other kernels under capture; what stands between two kernels of one part is of that part.

    Raises:
        CaptureError: less than 90% of the kernels are found again.
    """
    old = [event["name"] for event in eager_kernels]
    new = [event["name"] for event in kernels]
    labels: list[Key | None] = [None] * len(new)
    i = j = 0
    while i < len(old) and j < len(new):
        if old[i] == new[j]:
            labels[j] = eager_keys[i]
            i, j = i + 1, j + 1
        else:
            i, j = _next_match(old, new, i, j)
    found = sum(label is not None for label in labels)
    if found < 0.9 * len(new):
        raise CaptureError(f"of {len(new)} kernels in the graph only {found} are the loop's own")
    return _filled(labels)


def _next_match(old: Sequence[str], new: Sequence[str], i: int, j: int) -> tuple[int, int]:
    """The nearest pair of equal names behind a difference: fewest kernels skipped in all."""
    for skipped in range(1, 2 * _RESYNC):
        for ahead in range(max(0, skipped - _RESYNC), min(skipped, _RESYNC) + 1):
            x, y = i + skipped - ahead, j + ahead
            if old[x : x + 2] == new[y : y + 2] != []:
                return x, y
    return len(old), len(new)


def _filled(labels: Sequence[Key | None]) -> list[Key]:
    filled = []
    for place, label in enumerate(labels):
        if label is None:
            before = next((k for k in reversed(labels[:place]) if k), None)
            after = next((k for k in labels[place:] if k), None)
            label = before if before and before == after else NOWHERE
        filled.append(label)
    return filled


def _split(
    name: str,
    loop: EagerLoop,
    cycle_us: float,
    traced_us: float,
    kernels: Sequence[Event],
    labels: Sequence[Key],
    events: Sequence[Event],
    host_us: dict[Key, float],
) -> Split:
    gpu_us: dict[Key, float] = defaultdict(float)
    for key, us in busy(kernels, labels).items():
        gpu_us[key] += us / TRACED
    calls = [e for e in events if "Launch" in e["name"] and e.get("cat", "").startswith("cuda_")]
    return Split(
        implementation=name,
        vocab=loop.draft_vocab,
        steps=loop.spec.steps,
        cycles=TRACED,
        cycle_us=cycle_us,
        gpu_us=dict(gpu_us),
        host_us=host_us,
        kernels=len(kernels) / TRACED,
        launches=len(calls) / TRACED,
        traced_cycle_us=traced_us,
    )
