"""Bars of a round's milliseconds: a panel for each shape and tree, a group for each workload."""

from collections.abc import Sequence
from pathlib import Path

from bench.plots import COLOURS
from bench.serving.rows import Row, gains


def draw(rows: Sequence[Row], out: Path) -> Path:
    """Write ``serve.png``: medians, with the extremes as whiskers and the gain over stock above."""
    from matplotlib.figure import Figure

    panels: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        panels.setdefault((row.run, row.shape, row.tree), []).append(row)
    names = list(dict.fromkeys(row.variant for row in rows))
    figure = Figure(figsize=(10, 0.8 + 3.2 * len(panels)), layout="constrained")
    axes = figure.subplots(len(panels), 1, squeeze=False).flatten()
    for ax, ((_, shape, tree), group) in zip(axes, panels.items(), strict=True):
        _panel(ax, group, names)
        ax.set_title(f"{shape}, tree {tree}", fontsize="medium")
    handles = {}
    for ax in axes:
        artists, labels = ax.get_legend_handles_labels()
        handles |= dict(zip(labels, artists, strict=True))
    figure.legend([*handles.values()], [*handles], loc="outside lower center", ncols=4)
    figure.suptitle("Decode round: median of the alternations, extremes, × stock with the map")
    out.mkdir(parents=True, exist_ok=True)
    figure.savefig(out / "serve.png", dpi=140)
    return out / "serve.png"


def _panel(ax, group: Sequence[Row], names: Sequence[str]) -> None:  # noqa: ANN001
    cases = list(dict.fromkeys((row.batch, row.context) for row in group))
    width = 0.8 / len(names)
    for i, name in enumerate(names):
        own = {(row.batch, row.context): row for row in group if row.variant == name}
        places = [j + (i - (len(names) - 1) / 2) * width for j, c in enumerate(cases) if c in own]
        found = [own[case] for case in cases if case in own]
        if not found:
            continue
        times = [row.ms_round for row in found]
        reach = [
            [row.ms_round - row.ms_min for row in found],
            [row.ms_max - row.ms_round for row in found],
        ]
        colour = COLOURS[i % len(COLOURS)]
        ax.bar(places, times, width * 0.92, yerr=reach, color=colour, label=name, capsize=2)
        for place, row in zip(places, found, strict=True):
            gain = gains(row, group).mapped
            if gain is not None:
                ax.annotate(f"{gain:.2f}", (place, row.ms_max), ha="center", va="bottom", size=7)
    ax.set_xticks(range(len(cases)), [f"batch {b}, {c:,}" for b, c in cases], fontsize="small")
    ax.set_ylabel("ms a round")
    ax.grid(axis="y", alpha=0.3, linewidth=0.6)
    ax.spines[["top", "right"]].set_visible(False)
