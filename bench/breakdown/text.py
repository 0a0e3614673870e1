"""Splits, sweeps and what follows from them, as text."""

from collections.abc import Iterator, Sequence

from bench.breakdown.parts import HEAD_PARTS, IDLE, PHASES, TOLERANCE, Split
from bench.breakdown.sweep import sweeps

_WIDTHS = (32, 11, 11, 8, 11, 11, 9)
_HEADINGS = ("", "GPU us", "per step", "% cycle", "host us", "expected", "ratio")
AGREEMENT, AGREED_US = 0.05, 50.0  # of two runs, for parts at least this long
PREDICTED = 0.15  # memory-bound parts may differ from their expected time by so much
PAPER = "the paper's 62% (49% + 13%) of draft time, Llama-3-8B on an A800"


def table(split: Split) -> str:
    """One split: a row for each part, totals, and whether they add up."""
    lines = [
        f"{split.implementation}, draft vocabulary {split.vocab:,}: {split.cycle_us:.0f} us a "
        f"cycle ({split.traced_cycle_us:.0f} while traced), {split.kernels:.0f} kernels, "
        f"{split.launches:.0f} launches",
        _line(*_HEADINGS),
        *_rows(split),
        sums(split),
        *split.mislabelled,
    ]
    return "\n".join(lines)


def _rows(split: Split) -> Iterator[str]:
    for phase in PHASES:
        for where, part in split.named_parts():
            if where == phase:
                yield _part(split, phase, part)
        total = split.phase_us(phase)
        host = sum(us for (where, _), us in split.host_us.items() if where == phase)
        expected = sum(w.expected_us for (where, _), w in split.work.items() if where == phase)
        if total or host:
            yield _line(f"{phase} total", *_times(split, phase, total, host, expected))
    idle = split.idle_us
    yield _line(IDLE, f"{idle:.1f}", "", f"{idle / split.cycle_us:.1%}", "", "", "")
    host = sum(split.host_us.values())
    expected = sum(work.expected_us for work in split.work.values())
    yield _line("cycle", *_times(split, "", split.busy_us + idle, host, expected))


def _part(split: Split, phase: str, part: str) -> str:
    key = phase, part
    work = split.work.get(key)
    expected = work.expected_us if work else 0.0
    us, host = split.gpu_us.get(key, 0.0), split.host_us.get(key, 0.0)
    mark = " *" if work and work.memory_bound else ""
    return _line(f"{phase} {part}{mark}", *_times(split, phase, us, host, expected))


def _times(split: Split, phase: str, us: float, host: float, expected: float) -> Iterator[str]:
    yield f"{us:.1f}"
    yield f"{us / split.steps:.1f}" if phase == "draft" else ""
    yield f"{us / split.cycle_us:.1%}"
    yield f"{host:.1f}" if host else ""
    yield f"{expected:.1f}" if expected else ""
    yield f"{us / expected:.2f}" if expected else ""


def _line(name: str, *cells: str) -> str:
    widths = _WIDTHS[1:]
    return f"{name:<{_WIDTHS[0]}}" + "".join(
        f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True)
    )


def sums(split: Split) -> str:
    """Whether named parts and idle time are the cycle."""
    verdict = "add up" if split.adds_up else "DO NOT ADD UP"
    return (
        f"parts and idle time {verdict}: {split.missing:+.1%} of the cycle is missing "
        f"(allowed: {TOLERANCE:.0%}); unattributed {split.unattributed_us:.1f} us"
    )


def faults(split: Split) -> list[str]:
    """Why a split is not to be believed; nothing if it is."""
    return [*([] if split.adds_up else [sums(split)]), *split.mislabelled]


def head_shares(split: Split) -> str:
    """What head, softmax and top-k are of the draft, of the cycle and of the host's time."""
    head = split.part_us("LM head", "softmax", phase="draft")
    wider = split.part_us(*HEAD_PARTS, phase="draft")
    softmax = split.part_us("softmax", phase="draft")
    draft, cycle = split.phase_us("draft"), split.cycle_us
    text = (
        f"{split.implementation}, V {split.vocab:,}: draft LM head + softmax {_share(head, draft)} "
        f"of the draft's GPU time, {_share(head, cycle)} of the cycle; with top-k "
        f"{_share(wider, draft)} and {_share(wider, cycle)}; softmax alone "
        f"{_share(softmax, split.busy_us)} of the GPU's work, {_share(softmax, cycle)} of the cycle"
    )
    host = split.host_us.get(("draft", "softmax"))
    if host:
        text += f", {_share(host, sum(split.host_us.values()))} of the host's time"
    return text + f"; the GPU works in {_share(split.busy_us, cycle)} of the cycle"


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.1%}" if whole else "-"


def disagreements(splits: Sequence[Split]) -> list[str]:
    """Parts of more than 50 us that differ by more than 5% between two runs of the same."""
    found = []
    for place, first in enumerate(splits):
        for second in splits[place + 1 :]:
            if (first.implementation, first.vocab) != (second.implementation, second.vocab):
                continue
            for key in first.named_parts():
                one, other = first.gpu_us.get(key, 0.0), second.gpu_us.get(key, 0.0)
                if max(one, other) > AGREED_US and abs(one - other) > AGREEMENT * max(one, other):
                    found.append(
                        f"{first.implementation}, V {first.vocab:,}: {' '.join(key)} took "
                        f"{one:.1f} us in one run and {other:.1f} in another"
                    )
    return found


def mispredicted(splits: Sequence[Split]) -> tuple[int, list[str]]:
    """How many memory-bound parts there are, and which miss their expected time by over 15%."""
    count, missed = 0, []
    for split in splits:
        for key, work in split.work.items():
            ratio = split.ratio(key) if work.memory_bound else None
            if ratio is None:
                continue
            count += 1
            if abs(ratio - 1) > PREDICTED:
                missed.append(
                    f"{split.implementation}, V {split.vocab:,}: {' '.join(key)} took "
                    f"{split.gpu_us[key]:.1f} us, {ratio:.2f} times what was expected"
                )
    return count, missed


def summary(splits: Sequence[Split], vocab: int) -> str:
    """Head shares of all splits, then the lines of the sweeps."""
    lines = [f"Head and softmax, to be read beside {PAPER}:"]
    lines += [f"  {head_shares(split)}" for split in splits]
    again = len(splits) - len({(split.implementation, split.vocab) for split in splits})
    if again:
        apart = disagreements(splits)
        lines += [
            "",
            f"Measured again: {again}; parts above {AGREED_US:.0f} us that differ by more",
        ]
        lines[-1] += f" than {AGREEMENT:.0%}: {len(apart) or 'none'}"
        lines += [f"  {line}" for line in apart]
    count, missed = mispredicted(splits)
    if count:
        lines += ["", f"Memory-bound parts within {PREDICTED:.0%} of the arithmetic model:"]
        lines[-1] += f" {count - len(missed)} of {count}"
        lines += [f"  {line}" for line in missed]
    fits = sweeps(splits)
    if fits:
        lines += [
            "",
            "Time per cycle against the draft's vocabulary, elapsed and without idle time:",
        ]
        lines += [f"  {line}" for name in fits for line in fits[name].lines(name, vocab)]
    return "\n".join(lines)
