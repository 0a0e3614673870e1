"""GPU time by label, from the events of a torch profiler trace."""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from typing import Any, TypeVar

from bench.serving.trace_file import ON_GPU, ON_HOST, Event

Label = TypeVar("Label", bound=Hashable)


def gpu_events(events: Iterable[Event]) -> list[Event]:
    """Kernels, copies and fills by start time."""
    return sorted((e for e in events if e.get("cat") in ON_GPU), key=lambda e: e["ts"])


def busy(events: Sequence[Event], labels: Sequence[Label]) -> dict[Label, float]:
    """Microseconds by label, each moment given to one kernel.

    Where kernels overlap, the one that started first keeps the time until it ends, so the sum is
    the time in which anything ran.

    Args:
        events: GPU events by start time.
        labels: one for each.
    """
    total: dict[Label, float] = defaultdict(float)
    until = float("-inf")
    for event, label in zip(events, labels, strict=True):
        end = event["ts"] + event["dur"]
        if end > until:
            total[label] += end - max(event["ts"], until)
            until = end
        else:
            total[label] += 0.0
    return dict(total)


def launch_times(events: Iterable[Event]) -> dict[int, Event]:
    """The host's call by the correlation number that it shares with what it launched."""
    calls = {}
    for event in events:
        if event.get("cat") in ON_HOST and "correlation" in event.get("args", {}):
            calls[event["args"]["correlation"]] = event
    return calls


class Ranges:
    """Annotated ranges that do not overlap, for looking up which of them a host call is in."""

    def __init__(self, events: Iterable[Event], known: Iterable[str]) -> None:
        names = frozenset(known)
        by_thread: dict[Any, list[Event]] = defaultdict(list)
        for event in events:
            if event.get("cat") == "user_annotation" and event["name"] in names:
                by_thread[event.get("tid")].append(event)
        self._ranges = {
            thread: sorted(ranges, key=lambda e: e["ts"]) for thread, ranges in by_thread.items()
        }
        self._starts = {
            thread: [event["ts"] for event in ranges] for thread, ranges in self._ranges.items()
        }

    def at(self, call: Event) -> str | None:
        """Name of the range around ``call`` on its thread."""
        thread = call.get("tid")
        place = bisect_right(self._starts.get(thread, ()), call["ts"]) - 1
        if place < 0:
            return None
        event = self._ranges[thread][place]
        return event["name"] if call["ts"] < event["ts"] + event["dur"] else None
