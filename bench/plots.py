"""Time against a parameter of the cases: a line for each provider, its spread, and the floor."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from bench.op import Case, OpSpec
from bench.runner import Row

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes

# Okabe and Ito's colours, which the colour-blind can tell apart; the first provider is ours.
COLOURS = ("#D55E00", "#0072B2", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#666666")
MARKERS = "osD^vPX"
PANELS_A_ROW = 3
LABEL_ROOM = 0.12  # of the axis: what the label of a tick needs
FLOOR_ROOM = 4  # a floor further than this below all times is cut off: it would squeeze the lines

Times = Mapping[tuple[str, str], Row]  # by case id and provider


def draw(op: OpSpec, cases: Sequence[Case], rows: Sequence[Row], out: Path) -> list[Path]:
    """One image for each of the operation's axes that at least two cases differ in alone."""
    times = {(r.case, r.provider): r for r in rows if r.op == op.name and r.us_p50}
    timed = {case for case, _ in times}
    drawn = []
    for axis in op.axes:
        groups = _groups([c for c in cases if c.id in timed], axis)
        if groups:
            drawn.append(_image(op, axis, groups, times, out))
    return drawn


def _groups(cases: Sequence[Case], axis: str) -> dict[str, list[Case]]:
    """Cases that agree in all but ``axis``, by what they agree in."""
    groups: dict[str, list[Case]] = {}
    for case in cases:
        if axis in case.params:
            rest = Case(**{k: v for k, v in case.params.items() if k != axis})
            groups.setdefault(_title(rest), []).append(case)
    return {k: sorted(g, key=lambda c: c[axis]) for k, g in groups.items() if len(g) > 1}


def _title(case: Case) -> str:
    return ", ".join(v if isinstance(v, str) else f"{k} {v:,}" for k, v in case.params.items())


def _image(
    op: OpSpec, axis: str, groups: Mapping[str, Sequence[Case]], times: Times, out: Path
) -> Path:
    from matplotlib.figure import Figure

    columns = min(len(groups), PANELS_A_ROW)
    lines = -(-len(groups) // columns)
    figure = Figure(figsize=(max(4.4 * columns, 6.4), 3.6 * lines + 0.9), layout="constrained")
    panels = figure.subplots(lines, columns, squeeze=False).flatten()
    for ax, (title, cases) in zip(panels, groups.items(), strict=False):
        _panel(ax, op, axis, cases, times)
        ax.set_title(title, fontsize="medium")
    for ax in panels[len(groups) :]:
        ax.set_visible(False)
    handles: dict[str, Artist] = {}
    for ax in panels[: len(groups)]:
        artists, labels = ax.get_legend_handles_labels()
        handles |= dict(zip(labels, artists, strict=True))
    names = [*(name for name in op.providers if name in handles), "floor"]
    figure.legend(
        [handles[name] for name in names],
        names,
        loc="outside lower center",
        ncols=min(len(handles), 3 * columns),
        frameon=False,
    )
    figure.suptitle(f"{op.name}: time of a call, median with 20th to 80th percentile")
    path = out / f"{op.name}-{axis}.png"
    figure.savefig(path, dpi=140)
    return path


def _panel(ax: "Axes", op: OpSpec, axis: str, cases: Sequence[Case], times: Times) -> None:
    from matplotlib.ticker import LogLocator

    for index, name in enumerate(op.providers):
        measured = [(c[axis], times[c.id, name]) for c in cases if (c.id, name) in times]
        if measured:
            _line(ax, index, name, measured)
    floors = [_of(case, times)[0].floor_us or 0.0 for case in cases]
    ticks = [c[axis] for c in cases]
    ax.plot(ticks, floors, color="black", linestyle="--", linewidth=1, label="floor", zorder=1)
    ax.set(xlabel=axis, ylabel="µs", xscale="log", yscale="log")
    fastest = min(row.us_p50 or 0.0 for case in cases for row in _of(case, times))
    ax.set_ylim(bottom=max(min(*floors, fastest), fastest / FLOOR_ROOM) * 0.8)
    ax.set_xticks(ticks, _labels(ticks), fontsize="small")
    ax.tick_params(axis="x", which="minor", bottom=False, labelbottom=False)
    bottom, top = ax.get_ylim()
    ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if top > 8 * bottom else range(1, 10)))
    ax.yaxis.set_major_formatter("{x:g}")
    ax.yaxis.set_minor_formatter("")
    ax.tick_params(axis="y", labelsize="small")
    ax.grid(alpha=0.3, linewidth=0.6)
    ax.spines[["top", "right"]].set_visible(False)


def _labels(ticks: Sequence[float]) -> list[str]:
    """A label for each of the ascending ``ticks`` of a logarithmic axis that has room for one."""
    room = LABEL_ROOM * math.log(ticks[-1] / ticks[0])
    labels, last = [], -math.inf
    for tick in ticks:
        fits = math.log(tick) - last >= room
        labels.append(f"{tick:,}" if fits else "")
        last = math.log(tick) if fits else last
    return labels


def _of(case: Case, times: Times) -> list[Row]:
    return [row for (name, _), row in times.items() if name == case.id]


def _line(ax: "Axes", index: int, name: str, measured: Sequence[tuple[float, Row]]) -> None:
    colour = COLOURS[index % len(COLOURS)]
    where = [x for x, _ in measured]
    ax.fill_between(
        where,
        [row.us_p20 or row.us_p50 or 0.0 for _, row in measured],
        [row.us_p80 or row.us_p50 or 0.0 for _, row in measured],
        color=colour,
        alpha=0.15,
        linewidth=0,
    )
    ax.plot(
        where,
        [row.us_p50 or 0.0 for _, row in measured],
        color=colour,
        marker=MARKERS[index % len(MARKERS)],
        markersize=4.5,
        linewidth=2.2 if index == 0 else 1.3,
        zorder=3 if index == 0 else 2,
        label=name,
    )
