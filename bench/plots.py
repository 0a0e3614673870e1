"""Time against a parameter of the cases: a line for each provider, and the floor."""

from collections.abc import Sequence
from pathlib import Path

from bench.op import Case, OpSpec
from bench.runner import Row


def draw(op: OpSpec, cases: Sequence[Case], rows: Sequence[Row], out: Path) -> list[Path]:
    """One image for each of the operation's axes that at least two cases differ in alone."""
    times = {(r.case, r.provider): r for r in rows if r.op == op.name and r.us_p50}
    drawn = []
    for axis in op.axes:
        groups = _groups([c for c in cases if any(k[0] == c.id for k in times)], axis)
        if groups:
            drawn.append(_image(op, axis, groups, times, out))
    return drawn


def _groups(cases: Sequence[Case], axis: str) -> dict[str, list[Case]]:
    """Cases that agree in all but ``axis``, by what they agree in."""
    groups: dict[str, list[Case]] = {}
    for case in cases:
        if axis in case.params:
            rest = Case(**{k: v for k, v in case.params.items() if k != axis})
            groups.setdefault(rest.id, []).append(case)
    return {k: sorted(g, key=lambda c: c[axis]) for k, g in groups.items() if len(g) > 1}


def _image(
    op: OpSpec,
    axis: str,
    groups: dict[str, list[Case]],
    times: dict[tuple[str, str], Row],
    out: Path,
) -> Path:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.5 * len(groups), 4.2), layout="constrained")
    panels = figure.subplots(1, len(groups), squeeze=False)[0]
    for ax, (title, cases) in zip(panels, groups.items(), strict=True):
        for name in op.providers:
            points = [(c[axis], times[c.id, name].us_p50) for c in cases if (c.id, name) in times]
            if points:
                ax.plot(*zip(*points, strict=True), marker="o", label=name)
        floors = [next(r.floor_us for k, r in times.items() if k[0] == c.id) for c in cases]
        ax.plot([c[axis] for c in cases], floors, "k--", label="floor")
        ax.set(title=title, xlabel=axis, ylabel="µs (p50)", xscale="log", yscale="log")
        ax.grid(alpha=0.3, which="both")
        ax.legend(fontsize="small")
    figure.suptitle(op.name)
    path = out / f"{op.name}-{axis}.png"
    figure.savefig(path, dpi=110)
    return path
