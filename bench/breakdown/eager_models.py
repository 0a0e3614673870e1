"""The eager loops of several models: all times first, while nothing else runs, then all traces."""

import time
from collections import deque
from collections.abc import Callable, Sequence

import torch

from bench.breakdown import eager_run
from bench.breakdown.eager_loop import EagerLoop
from bench.breakdown.eager_model import family_of
from bench.breakdown.results import Results

FULL = "full"
ALL_TIMED = "all times taken; traces follow"
Say = Callable[[str], None]


def measure(
    runs: Sequence[Results], vocabs: Sequence[str], cycles: int, graphs: bool, keep_traces: bool
) -> None:
    """Add splits to the results of each model.

    Args:
        runs: one for each model. All of them are in memory until their traces are taken.
        vocabs: draft vocabularies; ``full`` is the model's own.
        cycles: timed for each.
        graphs: whether to capture cycles, too.
        keep_traces: in the results' folders.

    Raises:
        ValueError: a vocabulary that is no number, or smaller than top-k.
    """
    sizes = [[_vocab(text, results) for text in vocabs] for results in runs]
    began = time.monotonic()

    def say(line: str) -> None:
        print(f"[{time.monotonic() - began:6.1f}] {line}", flush=True)

    timed = deque[tuple[Results, EagerLoop, list[eager_run.Timed]]]()
    for results, own in zip(runs, sizes, strict=True):
        timed.append((results, *_time(results, own, cycles, graphs)))
        say(f"{results.title}: {len(own)} draft vocabularies timed")
    print(ALL_TIMED, flush=True)
    while timed:
        _trace(*timed.popleft(), keep_traces, say)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()  # servers may be starting beside this process


def _time(
    results: Results, vocabs: Sequence[int], cycles: int, graphs: bool
) -> tuple[EagerLoop, list[eager_run.Timed]]:
    loop = _loop(results)
    return loop, [eager_run.time_cycles(loop, vocab, cycles, graphs) for vocab in vocabs]


def _trace(
    results: Results,
    loop: EagerLoop,
    times: Sequence[eager_run.Timed],
    keep_traces: bool,
    say: Say,
) -> None:
    traces = results.folder / "traces" if keep_traces and results.folder else None
    for one in times:
        found = eager_run.split_cycles(loop, one, traces)
        results.add(found)
        for each in found:
            say(
                f"{results.title}: {each.implementation}, V {each.vocab:,}: "
                f"{each.cycle_us:.0f} us a cycle, GPU busy {each.busy_us:.0f}"
            )


def _vocab(text: str, results: Results) -> int:
    vocab = results.shape.vocab if text == FULL else int(text) if text.isdigit() else 0
    if vocab < results.spec.top_k:
        raise ValueError(
            f"--vocab {text}: write {FULL}, or a number of ids of at least --top-k "
            f"{results.spec.top_k}"
        )
    return vocab


def _loop(results: Results) -> EagerLoop:
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda" if on_gpu else "cpu")
    dtype = torch.bfloat16 if on_gpu else torch.float32
    family = family_of(results.title)
    return EagerLoop(results.shape, family, results.spec, device, dtype)
