"""Split a server's trace into the parts of its decode rounds."""

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.breakdown.parts import PHASES, Key, Split
from bench.breakdown.server_kernels import GEMM, kind, label
from bench.breakdown.timeline import busy, gpu_events
from bench.serving.trace_file import Event, TraceError, read_events

# Kernels of which one runs in each round: greedy acceptance, ours and SGLang's.
_ONCE_A_ROUND = ("accept_greedy_kernel", "VerifyTreeGreedy", "tree_speculative_sampling")
_STEADY = 3  # rounds in front that still belong to the prefill
HOST = "all parts"
_RANGES = {
    "draft": ("draft", "draft_extend"),
    "verify": ("step[TARGET_VERIFY",),
}


@dataclass(frozen=True)
class Traced:
    """A trace to be split, and what the split cannot see in it; see :func:`split`."""

    path: Path
    implementation: str
    vocab: int
    steps: int
    cycle_us: float | None


def split_file(traced: Traced) -> Split:
    """The split of one trace.

    Raises:
        TraceError: it is none of decode rounds.
    """
    given = asdict(traced)
    return split(read_events(given.pop("path")), **given)


def split(
    events: Iterable[Event],
    *,
    implementation: str,
    vocab: int,
    steps: int,
    cycle_us: float | None = None,
) -> Split:
    """Parts of a decode round, from a trace of several.

    Args:
        events: of the scheduler's process.
        implementation: names the server.
        vocab: ids that its draft proposes.
        steps: draft steps a round.
        cycle_us: length of a round while nothing was traced; without it the traced length, which
            the profiler stretches, stands for it.

    Raises:
        TraceError: fewer than two rounds.
    """
    events = list(events)
    gpu = gpu_events(events)
    ends = [i for i, e in enumerate(gpu) if any(name in e["name"] for name in _ONCE_A_ROUND)]
    ends = ends[_STEADY:] if len(ends) > 2 * _STEADY else ends
    if len(ends) < 2:
        raise TraceError(f"{len(ends)} rounds end in a trace of {len(gpu)} GPU events; two needed")
    rounds = len(ends) - 1
    # Labels look at neighbours, so they are given before the rounds are cut out.
    labels = label([event["name"] for event in gpu])[ends[0] : ends[-1]]
    inside = gpu[ends[0] : ends[-1]]
    products = Counter(
        key for key, event in zip(labels, inside, strict=True) if kind(event["name"]) == GEMM
    )
    begin, end = gpu[ends[0]]["ts"], gpu[ends[-1]]["ts"]
    launches = sum(
        "Launch" in e["name"] and begin <= e["ts"] < end
        for e in events
        if e.get("cat") in ("cuda_runtime", "cuda_driver")
    )
    traced_us = (end - begin) / rounds
    return Split(
        implementation=implementation,
        vocab=vocab,
        steps=steps,
        cycles=rounds,
        cycle_us=traced_us if cycle_us is None else cycle_us,
        gpu_us={key: us / rounds for key, us in busy(inside, labels).items()},
        host_us=_host_us(events, begin, end, rounds),
        kernels=len(inside) / rounds,
        launches=launches / rounds,
        traced_cycle_us=traced_us,
        products={key: count / rounds for key, count in products.items()},
    )


def _host_us(events: Iterable[Event], begin: float, end: float, rounds: int) -> dict[Key, float]:
    """Host time of each phase while it was traced: SGLang annotates phases, not parts."""
    host: dict[Key, float] = defaultdict(float)
    whole = 0.0
    for event in events:
        if event.get("cat") != "user_annotation" or not begin <= event["ts"] < end:
            continue
        name, us = event["name"], event["dur"] / rounds
        if name == "scheduler.run_batch":
            whole += us
        for phase, starts in _RANGES.items():
            if name in starts or any(s.endswith("VERIFY") and name.startswith(s) for s in starts):
                host[phase, HOST] += us
    rest = whole - sum(host.values())
    if rest > 0:
        host[PHASES[-1], HOST] = rest
    return dict(host)
