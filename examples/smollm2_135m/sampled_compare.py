"""Whether sampled replies are distributed alike, from the files of ``sampled_arm``.

    python -m examples.smollm2_135m.sampled_compare FOLDER

Compares every FRSPEC arm with ``plain``: the first, second and third token and all three together,
each with few and with many pools of rare outcomes, at every setting, with Holm's correction over
all of them (``bench.homogeneity``). Files of one arm and map size are counted together. Prints the
accept lengths of the arms at every map size, and what came again (``sampled_repeats``). Exits with
1 at an adjusted p-value of 0.01 or less, or if there was nothing to compare.
"""

import argparse
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

from bench.homogeneity import LEAST_EXPECTED, Counts, Homogeneity, holm, homogeneity

LEVEL = 0.01
# Share of the smaller sample that a pool holds at least, when pools are few.
COARSE_SHARE = 0.01
PLACES: dict[str, tuple[int, ...]] = {
    "token 1": (0,), "token 2": (1,), "token 3": (2,), "all three": (0, 1, 2),
}  # fmt: skip


class Comparison(NamedTuple):
    """One test."""

    arm: str
    setting: str
    what: str
    pools: str
    sizes: tuple[int, int]
    found: Homogeneity


def together(files: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One record for each arm and map size: counts added, replies in a row.

    Raises:
        ValueError: two files hold the same random numbers.
    """
    arms: dict[tuple[str, int], dict[str, Any]] = {}
    seeds: set[tuple[str, int, int]] = set()
    for file in files:
        key = file["arm"], file["map_size"]
        arm = arms.setdefault(key, {"arm": key[0], "map_size": key[1], "counts": {}, "replies": []})
        if file["counts"]:
            if (*key, file["random_seed"]) in seeds:
                raise ValueError(
                    f"two files of {key[0]} {key[1]:,} have the random seed {file['random_seed']}:"
                    " give each server a --random-seed of its own"
                )
            seeds.add((*key, file["random_seed"]))
        for setting, by_prompt in file["counts"].items():
            found = arm["counts"].setdefault(setting, [Counter() for _ in by_prompt])
            for counter, more in zip(found, by_prompt, strict=True):
                counter.update(more)
        arm["replies"] += file.get("replies", [])
    return list(arms.values())


def marginal(counts: Counts, places: tuple[int, ...]) -> Counter[str]:
    """Counts of the tokens at some places of the replies."""
    kept: Counter[str] = Counter()
    for reply, count in counts.items():
        tokens = reply.split(",")
        kept[",".join(tokens[place] for place in places)] += count
    return kept


def comparisons(plain: dict[str, Any], other: dict[str, Any]) -> list[Comparison]:
    """All tests of one arm; prompts are strata."""
    tests = []
    for setting, by_prompt in plain["counts"].items():
        strata = list(zip(by_prompt, other["counts"].get(setting, []), strict=False))
        if not strata:
            continue
        sizes = tuple(sum(sum(pair[side].values()) for pair in strata) for side in (0, 1))
        smallest = min(sum(sample.values()) for pair in strata for sample in pair)
        for what, places in PLACES.items():
            cut = [tuple(marginal(sample, places) for sample in pair) for pair in strata]
            for pools, least in (
                ("few", max(LEAST_EXPECTED, COARSE_SHARE * smallest)), ("many", LEAST_EXPECTED),
            ):  # fmt: skip
                found = homogeneity([(a, b) for a, b in cut], least)
                name = f"{other['arm']} {other['map_size']:,}"
                tests.append(Comparison(name, setting, what, pools, (sizes[0], sizes[1]), found))
    return tests


def accept_length(replies: list[tuple[int, int, int]]) -> tuple[float, float]:
    """Tokens per cycle, and its standard error: replies are independent, cycles of one are not."""
    cycles = [reply[0] for reply in replies]
    accepted = [reply[1] for reply in replies]
    rate = sum(accepted) / sum(cycles)
    spread = sum((a - rate * c) ** 2 for a, c in zip(accepted, cycles, strict=True))
    return 1 + rate, spread**0.5 / sum(cycles)


def distribution_table(tests: list[Comparison]) -> tuple[list[str], float]:
    """Markdown rows, and the smallest adjusted p-value."""
    adjusted = holm([test.found.p_value for test in tests])
    lines = [
        "| arm | setting | what | pools | replies | statistic | degrees | p | adjusted |",
        "|---|---|---|---|--:|--:|--:|--:|--:|",
    ]
    for test, p in zip(tests, adjusted, strict=True):
        f = test.found
        lines.append(
            f"| {test.arm} | {test.setting} | {test.what} | {test.pools} | {test.sizes[0]:,} /"
            f" {test.sizes[1]:,} | {f.statistic:.1f} | {f.degrees} | {f.p_value:.3f} | {p:.2f} |"
        )
    return lines, min(adjusted)


def accept_table(arms: list[dict[str, Any]]) -> list[str]:
    """Markdown rows: accept length by map size and arm."""
    found = {
        (arm["map_size"], arm["arm"]): accept_length(arm["replies"])
        for arm in arms
        if any(cycles for cycles, _, _ in arm.get("replies", []))
    }
    names = sorted({name for _, name in found}, reverse=True)
    pairs = [name for name in names if name.replace("drawn", "fixed") in names and "drawn" in name]
    titles = [*names, *(f"{name} - {name.replace('drawn', 'fixed')}" for name in pairs)]
    lines = ["| map | " + " | ".join(titles) + " |", "|--:|" + "--:|" * len(titles)]
    for size in sorted({size for size, _ in found}):
        cells = [
            "{:.3f} ± {:.3f}".format(*found[size, name]) if (size, name) in found else ""
            for name in names
        ]
        for name in pairs:
            two = [found.get((size, x)) for x in (name, name.replace("drawn", "fixed"))]
            (a, a_error), (b, b_error) = (x or (float("nan"),) * 2 for x in two)
            cells.append(f"{a - b:+.3f} ± {(a_error**2 + b_error**2) ** 0.5:.3f}")
        lines.append(f"| {size:,} | " + " | ".join(cells) + " |")
    return lines


def repeat_lines(name: str, file: dict[str, Any]) -> list[str]:
    """What came again in a file, in words."""
    lines = []
    for key, what in (("seeds", "seeded replies"), ("greedy", "greedy replies' log probabilities")):
        if not (found := file.get(key)):
            continue
        ways = ", ".join(f"{way} {equal}" for way, equal in found["equal"].items())
        lines.append(f"{name}: of {found['count']} {what} equal: {ways}")
        if key == "seeds":
            lines.append(f"    {found['distinct']} differ from each other")
            lines += [
                f"    {way}: reply {i} differs from token {place} on"
                for way, i, place in found["differences"]
            ]
        else:
            largest = ", ".join(f"{way} {value:.2g}" for way, value in found["largest"].items())
            lines.append(f"    largest differences: {largest}")
    return lines


def main() -> int:
    """Run the command and return its exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    files = {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}
    arms = together(list(files.values()))
    plain = next((arm for arm in arms if arm["arm"] == "plain"), None)
    others = [arm for arm in arms if arm["arm"] != "plain"]
    tests = [test for arm in others if plain for test in comparisons(plain, arm)]
    print("\n".join(accept_table(others)))
    print(
        "\n" + "\n".join(line for name, file in files.items() for line in repeat_lines(name, file))
    )
    if not tests:
        print("nothing to compare: no plain arm, or no arm beside it", file=sys.stderr)
        return 1
    lines, smallest = distribution_table(tests)
    verdict = "no difference" if smallest > LEVEL else "DIFFERENT"
    print("\n" + "\n".join(lines))
    print(f"\n{len(tests)} tests, smallest adjusted p-value {smallest:.4f}: {verdict}")
    return 0 if smallest > LEVEL else 1


if __name__ == "__main__":
    sys.exit(main())
