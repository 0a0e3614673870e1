"""Accept length, milliseconds a round and tokens per second against the size of a map."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.plots import COLOURS, MARKERS
from bench.serving.map_size_report import Speeds, rate, sized
from bench.serving.map_speed import ALL
from bench.serving.variants import EAGLE, FRSPEC, PLAIN

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PICTURE = "map_sizes.png"
_TIMES = "batch 1"


def draw(results: Mapping[str, Any], out: Path) -> Path:
    """Write ``map_sizes.png``: one request at a time, by domain, beside what ``choose`` predicts.

    Args:
        results: what ``bench map-sizes`` wrote.
        out: existing folder.

    Raises:
        ValueError: FRSPEC was timed at fewer than two sizes.
    """
    from matplotlib.figure import Figure

    speeds: Speeds = results.get(_TIMES, {})
    served = sized(speeds, FRSPEC)
    if len(served) < 2:
        raise ValueError(f"FRSPEC's rounds were timed at {len(served)} sizes: nothing to draw")
    full = max(served)
    stock = sized(speeds, EAGLE) | ({full: speeds[EAGLE]} if EAGLE in speeds else {})
    figure = Figure(figsize=(10, 7), layout="constrained")
    accept, time, rates, gain = figure.subplots(2, 2).flatten()
    _by_domain(accept, served, lambda speed, domain: speed["accept"][domain])
    accept.set(title="accept length of FRSPEC", ylabel="tokens a round")
    _by_domain(gain, served, lambda speed, domain: rate(speed, domain) / rate(served[full], domain))
    gain.axhline(1, color="black", linewidth=0.8)
    gain.set(title="tokens/s of FRSPEC", ylabel="× FRSPEC over all ids")
    _times(time, served, stock)
    _rates(rates, results, served, stock)
    for ax in (accept, time, rates, gain):
        ax.set_xscale("log")
        ax.set_xticks(sorted(served), [_short(size, full) for size in sorted(served)])
        ax.tick_params(axis="x", which="minor", bottom=False, labelbottom=False)
        ax.set_xlabel("ids that the draft proposes")
        ax.grid(alpha=0.3, linewidth=0.6)
        ax.spines[["top", "right"]].set_visible(False)
    for ax in (gain, time, rates):  # the first panel has the domains of the last
        ax.legend(fontsize="small", frameon=False)
    figure.suptitle(f"{results['model']}, one request at a time, {results['machine']['gpu']}")
    figure.savefig(out / PICTURE, dpi=110)
    return out / PICTURE


def _short(size: int, full: int) -> str:
    if size == full:
        return "full"
    return f"{size // 1024}k" if size % 1024 == 0 else f"{size:,}"


def _by_domain(ax: "Axes", served: Mapping[int, Any], value: Any) -> None:
    sizes = sorted(served)
    domains = list(served[sizes[0]]["accept"])
    for i, domain in enumerate(domains):
        style = {"color": COLOURS[i % len(COLOURS)], "linewidth": 1.3}
        if domain == ALL:
            style = {"color": "black", "linewidth": 2.2}
        values = [value(served[size], domain) for size in sizes]
        ax.plot(sizes, values, marker=MARKERS[i % len(MARKERS)], ms=4.5, label=domain, **style)


def _times(ax: "Axes", served: Mapping[int, Any], stock: Mapping[int, Any]) -> None:
    for i, (name, rows) in enumerate((("FRSPEC", served), ("EAGLE", stock))):
        if rows:
            sizes = sorted(rows)
            _spread(ax, i, name, sizes, [
                [rows[size][key] for size in sizes] for key in ("ms_round", "ms_min", "ms_max")
            ])  # fmt: skip
    ax.set(title="a round: median and extremes", ylabel="ms")
    ax.set_ylim(bottom=0)


def _rates(
    ax: "Axes", results: Mapping[str, Any], served: Mapping[int, Any], stock: Mapping[int, Any]
) -> None:
    for i, (name, rows) in enumerate((("FRSPEC", served), ("EAGLE", stock))):
        if rows:
            sizes = sorted(rows)
            accept = [rows[size]["accept"][ALL] for size in sizes]
            of = [
                [1e3 * a / rows[size][key] for a, size in zip(accept, sizes, strict=True)]
                for key in ("ms_round", "ms_max", "ms_min")
            ]
            _spread(ax, i, name, sizes, of)
    predicted = results.get("choice", {}).get("predicted", {})
    if predicted:
        rates = {int(k): 1e3 * p["accept"] / p["cycle_ms"] for k, p in predicted.items()}
        ax.plot(*zip(*sorted(rates.items()), strict=True), color="black", ls=":", label="choose")
    plain = results[_TIMES].get(PLAIN)
    if plain:
        ax.axhline(rate(plain, ALL), color=COLOURS[2], ls="--", label="no speculation")
    ax.set(title="all domains", ylabel="tokens/s")
    ax.set_ylim(bottom=0)


def _spread(
    ax: "Axes", place: int, name: str, sizes: Sequence[int], of: Sequence[Sequence[float]]
) -> None:
    """Middle values with the way to the lowest and to the highest as whiskers."""
    middle, low, high = of
    reach = [
        [m - v for m, v in zip(middle, low, strict=True)],
        [v - m for m, v in zip(middle, high, strict=True)],
    ]
    colour, marker = COLOURS[place], MARKERS[place]
    ax.errorbar(sizes, middle, yerr=reach, color=colour, marker=marker, ms=5, capsize=2, label=name)
