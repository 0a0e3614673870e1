"""The report: one HTML file that needs no network, no script and no font of its own."""

from collections.abc import Mapping, Sequence
from html import escape

from bench.breakdown import svg
from bench.breakdown.parts import IDLE, PARTS, UNKNOWN, Split
from bench.breakdown.sweep import sweeps
from bench.breakdown.text import faults, summary, table
from sgl_frspec.explain import Device

_STYLE = """
:root { color-scheme: light; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 960px; margin: 2rem auto; padding: 0 1rem;
  color: #1b1b1b; background: #fff; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2.2rem; }
pre { font: 12.5px/1.4 ui-monospace, monospace; overflow-x: auto; background: #f6f6f6;
  padding: .8rem; }
.words { white-space: pre-wrap; }
svg { width: 100%; height: auto; font: 12px system-ui, sans-serif; }
.grid { stroke: #ddd; } .fit { fill: none; stroke-width: 1.6; }
.roof { fill: none; stroke: #333; stroke-width: 1.6; }
.bar { stroke: #fff; stroke-width: .5; }
.legend { display: flex; flex-wrap: wrap; gap: .2rem 1rem; list-style: none; padding: 0; }
.legend span { display: inline-block; width: .8em; height: .8em; margin-right: .4em; }
.note { background: #fff3cd; padding: .6rem .8rem; }
.wrong { color: #a30000; font-weight: 600; }
"""


def render(
    splits: Sequence[Split],
    machine: Mapping[str, str],
    title: str,
    settings: str,
    device: Device,
    vocab: int,
    note: str = "",
) -> str:
    """The whole file.

    Args:
        splits: measured, with predictions where there are any.
        machine: what measured them.
        title: the model.
        settings: tree, batch and context in words.
        device: whose roof the roofline draws.
        vocab: of the model.
        note: a warning to stand above everything.
    """
    # What was measured again is in the answers and the figures, not in a second bar.
    names = list(dict.fromkeys(split.implementation for split in splits))
    first = list({(s.implementation, s.vocab): s for s in reversed(splits)}.values())
    first.sort(key=lambda split: (names.index(split.implementation), split.vocab))
    sections = [
        f"<h1>Where a cycle's time goes: {escape(title)}</h1>",
        f"<p>{escape(settings)}</p>",
        f'<p class="note">{escape(note)}</p>' if note else "",
        "<h2>Cycle by part</h2>",
        "<p>GPU time of each part, and the time in which no kernel runs: the GPU waits for the "
        "host, or, within one graph, for its next kernel.</p>",
        svg.legend((*PARTS, *((UNKNOWN,) if _unknown(splits) else ()), IDLE)),
        svg.stacked_bars(_bars(first), "µs a cycle", "stacked bars of parts, per cycle"),
        "<h2>Draft step by part</h2>",
        "<p>GPU time of the draft over its steps.</p>",
        svg.stacked_bars(_draft_bars(first), "µs a step", "stacked bars of parts, per step"),
        _sweep(splits),
        _roofline(first, device),
        "<h2>Answers</h2>",
        f'<pre class="words">{escape(summary(splits, vocab))}</pre>',
        "<h2>All figures</h2>",
        *(_figures(split) for split in splits),
        "<h2>Machine</h2>",
        f"<pre>{escape(chr(10).join(f'{k}: {v}' for k, v in machine.items()))}</pre>",
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<link rel="icon" href="data:,">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>Breakdown: {escape(title)}</title><style>{_STYLE}</style></head><body>\n"
        + "\n".join(sections)
        + "\n</body></html>\n"
    )


def _unknown(splits: Sequence[Split]) -> bool:
    return any(split.unattributed_us for split in splits)


def _name(split: Split) -> str:
    return f"{split.implementation}, V {split.vocab:,}"


def _bars(splits: Sequence[Split]) -> list[tuple[str, dict[str, float]]]:
    bars = []
    for split in splits:
        parts = {part: split.part_us(part) for part in (*PARTS, UNKNOWN)}
        parts = {part: us for part, us in parts.items() if us}
        bars.append((_name(split), parts | {IDLE: split.idle_us}))
    return bars


def _draft_bars(splits: Sequence[Split]) -> list[tuple[str, dict[str, float]]]:
    bars = []
    for split in splits:
        parts = {p: split.part_us(p, phase="draft") / split.steps for p in (*PARTS, UNKNOWN)}
        bars.append((_name(split), {part: us for part, us in parts.items() if us}))
    return bars


def _sweep(splits: Sequence[Split]) -> str:
    series = {}
    for name, sweep in sweeps(splits).items():
        ends = (0, max(sweep.vocabs))
        line = [(x, 1e3 * sweep.cycle.line.seconds(x)) for x in ends]
        points = zip(sweep.vocabs, sweep.cycle_us, strict=True)
        series[name] = [(v, us / 1e3) for v, us in points], line
    if not series:
        return ""
    chart = svg.points_with_lines(
        series, "draft vocabulary", "ms a cycle", "time per cycle against the vocabulary"
    )
    return f"<h2>Cycle against the draft's vocabulary</h2>\n{chart}"


def _roofline(splits: Sequence[Split], device: Device) -> str:
    points = []
    for split in splits:
        for key, work in split.work.items():
            us = split.gpu_us.get(key)
            if us and work.flops and work.nbytes:
                rate = work.flops / (us * 1e-6)
                words = (
                    f"{_name(split)}: {' '.join(key)}, {us / work.floor_us:.2f} x the floor, "
                    f"{work.nbytes / us / 1e6:.2f} TB/s"
                )
                points.append((key[1], words, work.flops / work.nbytes, rate))
    if not points:
        return ""
    chart = svg.roofline(points, device.bytes_per_s, device.flops_per_s, "roofline of the parts")
    return (
        f"<h2>Roofline</h2>\n<p>Operations and bytes by the arithmetic model, time as measured; "
        f"the roof is what a GPU of the type {escape(device.name.upper())} reaches.</p>\n{chart}"
    )


def _figures(split: Split) -> str:
    warning = "".join(f'<p class="wrong">{escape(line)}</p>' for line in faults(split))
    return f"<h3>{escape(_name(split))}</h3>{warning}<pre>{escape(table(split))}</pre>"
