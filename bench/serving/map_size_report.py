"""What FRSPEC gains at each size of a map: a table from the results of ``bench map-sizes``."""

from collections.abc import Mapping
from typing import Any

from bench.columns import aligned
from bench.serving.map_speed import ALL
from bench.serving.variants import EAGLE, FRSPEC

Speeds = Mapping[str, Mapping[str, Any]]
_BATCH = "batch "


def sized(speeds: Speeds, base: str) -> dict[int, Mapping[str, Any]]:
    """Figures of the servers named ``BASE-SIZE``, by size."""
    sizes = {name: name.removeprefix(f"{base}-") for name in speeds}
    return {int(size): speeds[name] for name, size in sizes.items() if size.isdigit()}


def rate(speed: Mapping[str, Any], domain: str) -> float:
    """Tokens per second of one request of a domain."""
    return 1e3 * speed["accept"][domain] / speed["ms_round"]


def gains(results: Mapping[str, Any]) -> str:
    """A table for each batch size.

    A row is a size of FRSPEC's map. Its time of a round and tokens per second are divided by those
    of stock EAGLE over the whole vocabulary, its time by that of stock EAGLE with the same ids, and
    its accept lengths by FRSPEC's own at the largest size.
    """
    batches = [key for key in results if key.startswith(_BATCH)]
    return "\n\n".join(f"{batch}\n{_table(results[batch])}" for batch in batches)


def _table(speeds: Speeds) -> str:
    served, stock = sized(speeds, FRSPEC), sized(speeds, EAGLE)
    if not served:
        return "no size of FRSPEC's map was timed"
    most = served[max(served)]
    domains = list(most["accept"])
    lines = [["ids", "ms", "ms ÷ EAGLE's", "÷ with these ids", "tok/s × EAGLE's", *domains]]
    full = speeds.get(EAGLE)
    for size, speed in sorted(served.items()):
        ms, same = speed["ms_round"], stock.get(size)
        lines.append(
            [
                f"{size:,}",
                f"{ms:.3f}",
                f"{ms / full['ms_round']:.3f}" if full else "-",
                f"{ms / same['ms_round']:.3f}" if same else "-",
                f"{rate(speed, ALL) / rate(full, ALL):.3f}" if full else "-",
                *(f"{speed['accept'][d] / most['accept'][d]:.1%}" for d in domains),
            ]
        )
    return "\n".join(aligned(lines, left=0))
