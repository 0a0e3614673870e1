"""Charts as inline SVG: stacked bars, lines with points, a roofline. No scripts, no fonts."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape

from bench.breakdown.parts import IDLE, PARTS, UNKNOWN

WIDTH = 920
_LEFT, _RIGHT, _TOP, _BOTTOM = 78, 24, 16, 46
# Okabe and Ito's colours first, then darker and lighter ones; idle time is pale.
_COLOURS = (
    "#999933", "#56B4E9", "#882255", "#44AA99", "#0072B2", "#009E73",
    "#D55E00", "#E69F00", "#F0E442", "#CC79A7", "#332288", "#666666",
)  # fmt: skip
COLOURS = dict(zip(PARTS, _COLOURS, strict=True)) | {UNKNOWN: "#000000", IDLE: "#E4E4E4"}
_SERIES = ("#D55E00", "#0072B2", "#009E73", "#CC79A7", "#332288")


@dataclass(frozen=True)
class Axis:
    """Maps values to pixels, linearly or by logarithm."""

    low: float
    high: float
    begin: float
    end: float
    log: bool = False

    def at(self, value: float) -> float:
        """The pixel of ``value``."""
        low, high, value = (
            (math.log10(v) for v in (self.low, self.high, value))
            if self.log
            else (self.low, self.high, value)
        )
        share = (value - low) / (high - low) if high > low else 0.5
        return self.begin + share * (self.end - self.begin)

    def ticks(self) -> list[float]:
        """Round values within the axis."""
        if self.log:
            first, last = math.ceil(math.log10(self.low)), math.floor(math.log10(self.high))
            return [10.0**e for e in range(first, last + 1)]
        span = self.high - self.low
        if span <= 0:
            return [self.low]
        raw = span / 5
        power = 10 ** math.floor(math.log10(raw))
        step = next(m * power for m in (1, 2, 5, 10) if m * power >= raw)
        count = math.floor(self.high / step) - math.ceil(self.low / step) + 1
        return [(math.ceil(self.low / step) + i) * step for i in range(count)]


def number(value: float) -> str:
    """Short: 1,234 or 0.12, and powers of ten for what is far from one."""
    if value and not 1e-3 <= abs(value) < 1e7:
        return f"{value:.0e}".replace("e+0", "e").replace("e-0", "e-")
    return f"{value:,.0f}" if abs(value) >= 10 else f"{value:.3g}"


def text(x: float, y: float, words: str, anchor: str = "start", turn: float = 0) -> str:
    """One line of text."""
    rotate = f' transform="rotate({turn} {x:.1f} {y:.1f})"' if turn else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{rotate}>{escape(words)}</text>'


def document(height: float, body: Iterable[str], label: str) -> str:
    """The ``svg`` element around a chart; ``label`` is what a screen reader says."""
    return (
        f'<svg role="img" aria-label="{escape(label, quote=True)}" '
        f'viewBox="0 0 {WIDTH} {height:.0f}">{"".join(body)}</svg>'
    )


def stacked_bars(bars: Sequence[tuple[str, Mapping[str, float]]], unit: str, label: str) -> str:
    """Horizontal bars of parts.

    Args:
        bars: a name each, and (part, value) in the order of stacking.
        unit: of the values.
        label: for screen readers.
    """
    names, pitch = 250, 30
    height = _TOP + pitch * len(bars) + _BOTTOM
    longest = max((sum(parts.values()) for _, parts in bars), default=1.0) or 1.0
    axis = Axis(0, longest, names, WIDTH - _RIGHT)
    body = [_vertical_grid(axis, _TOP, height - _BOTTOM)]
    for row, (name, parts) in enumerate(bars):
        y, done = _TOP + pitch * row + 4, 0.0
        body.append(text(names - 8, y + 15, name, "end"))
        for part, value in parts.items():
            left, right = axis.at(done), axis.at(done + value)
            done += value
            tip = f"{name}: {part} {number(value)} {unit}"
            body.append(
                f'<rect class="bar" x="{left:.2f}" y="{y}" width="{right - left:.2f}" '
                f'height="{pitch - 8}" fill="{COLOURS.get(part, "#000")}">'
                f"<title>{escape(tip)}</title></rect>"
            )
    body.append(text((names + WIDTH) / 2, height - 8, unit, "middle"))
    return document(height, body, label)


def _vertical_grid(axis: Axis, top: float, bottom: float) -> str:
    lines = []
    for tick in axis.ticks():
        x = axis.at(tick)
        lines.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{top}" y2="{bottom}"/>')
        lines.append(text(x, bottom + 16, number(tick), "middle"))
    return "".join(lines)


def _horizontal_grid(axis: Axis) -> str:
    lines = []
    for tick in axis.ticks():
        y = axis.at(tick)
        lines.append(
            f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        )
        lines.append(text(_LEFT - 8, y + 4, number(tick), "end"))
    return "".join(lines)


def points_with_lines(
    series: Mapping[str, tuple[Sequence[tuple[float, float]], Sequence[tuple[float, float]]]],
    x_label: str,
    y_label: str,
    label: str,
) -> str:
    """Measured points and a line through each set of them, on linear axes from zero.

    Args:
        series: by name, (x, y) of the points, and the (x, y) ends of the line.
        x_label, y_label: with units.
        label: for screen readers.
    """
    height = 380
    every = [p for points, line in series.values() for p in (*points, *line)]
    x_axis = Axis(0, max((x for x, _ in every), default=1), _LEFT, WIDTH - _RIGHT)
    y_axis = Axis(0, 1.08 * max((y for _, y in every), default=1), height - _BOTTOM, _TOP)
    body = [_vertical_grid(x_axis, _TOP, height - _BOTTOM), _horizontal_grid(y_axis)]
    for place, (name, (points, line)) in enumerate(series.items()):
        colour = _SERIES[place % len(_SERIES)]
        path = " ".join(f"{x_axis.at(x):.1f},{y_axis.at(y):.1f}" for x, y in line)
        body.append(f'<polyline class="fit" points="{path}" stroke="{colour}"/>')
        for x, y in points:
            body.append(
                f'<circle class="point" cx="{x_axis.at(x):.1f}" cy="{y_axis.at(y):.1f}" r="4" '
                f'fill="{colour}"><title>{escape(f"{name}: {number(x)}, {number(y)}")}</title>'
                "</circle>"
            )
        x, y = line[-1]
        body.append(
            f'<g fill="{colour}">{text(x_axis.at(x) - 6, y_axis.at(y) - 8, name, "end")}</g>'
        )
    body += _axis_names(height, x_label, y_label)
    return document(height, body, label)


def _axis_names(height: float, x_label: str, y_label: str) -> list[str]:
    middle = (_LEFT + WIDTH - _RIGHT) / 2
    return [
        text(middle, height - 8, x_label, "middle"),
        text(16, height / 2, y_label, "middle", turn=-90),
    ]


def roofline(
    parts: Sequence[tuple[str, str, float, float]],
    bytes_per_s: float,
    flops_per_s: float,
    label: str,
) -> str:
    """Parts under the roof of memory bandwidth and of the matrix peak, both axes logarithmic.

    Args:
        parts: (part, description, operations a byte, operations a second).
        bytes_per_s, flops_per_s: reachable.
        label: for screen readers.
    """
    height = 420
    xs, ys = [x for _, _, x, _ in parts] or [1.0], [y for _, _, _, y in parts] or [1e12]
    ridge = flops_per_s / bytes_per_s
    x_axis = Axis(min(*xs, 0.5) / 2, 4 * max(*xs, ridge), _LEFT, WIDTH - _RIGHT, log=True)
    y_axis = Axis(min(ys) / 3, 3 * max(*ys, flops_per_s), height - _BOTTOM, _TOP, log=True)
    low = max(x_axis.low, y_axis.low / bytes_per_s)
    corners = ((low, low * bytes_per_s), (ridge, flops_per_s), (x_axis.high, flops_per_s))
    path = " ".join(f"{x_axis.at(x):.1f},{y_axis.at(y):.1f}" for x, y in corners)
    body = [_vertical_grid(x_axis, _TOP, height - _BOTTOM), _horizontal_grid(y_axis)]
    body.append(f'<polyline class="roof" points="{path}"/>')
    for part, description, x, y in parts:
        body.append(
            f'<circle class="point" cx="{x_axis.at(x):.1f}" cy="{y_axis.at(y):.1f}" r="5" '
            f'fill="{COLOURS.get(part, "#000")}"><title>{escape(description)}</title></circle>'
        )
    body += _axis_names(height, "operations a byte", "operations a second")
    return document(height, body, label)


def legend(parts: Iterable[str]) -> str:
    """Swatches with names, as HTML."""
    items = "".join(
        f'<li><span style="background:{COLOURS[part]}"></span>{escape(part)}</li>' for part in parts
    )
    return f'<ul class="legend">{items}</ul>'
