"""Which part of a cycle each kernel of the eager loop belongs to."""

from collections.abc import Sequence

from bench.breakdown.parts import UNKNOWN, Key
from bench.breakdown.ranges import NAMES
from bench.breakdown.timeline import Ranges, gpu_events, launch_times
from bench.serving.trace_file import Event

_RESYNC = 24  # kernels that a library may use more or less of at one place
NOWHERE: Key = ("between", UNKNOWN)


class CaptureError(RuntimeError):
    """A graph that runs other kernels than the loop it was captured from."""


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
