"""Whether two samples of discrete outcomes come from one distribution.

Pearson's chi-square test of homogeneity. Outcomes are compared within strata (prompts, say), whose
statistics and degrees of freedom add up. Rare outcomes are pooled, in the order of their count in
both samples together, until enough are expected in each pool in the smaller sample: which pool an
outcome is in does not depend on how its count is shared between the samples. Few large pools notice
a small shift between likely outcomes, many small ones a large shift anywhere.

Several tests are judged together by Holm's method (Scand. J. Statist. 6, 1979): the chance that any
of their adjusted p-values is at or below a level is at most that level if nothing differs.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

LEAST_EXPECTED = 5.0
Counts = Mapping[Any, int]


class Homogeneity(NamedTuple):
    """Outcome of a test.

    Attributes:
        statistic: Pearson's.
        degrees: of freedom; 0 if there was nothing to compare.
        p_value: chance of a statistic at least as large if nothing differs.
        total_variation: half the sum of the differences of shares, over the pools and weighted by
            the strata's sizes. It is above 0 by chance alone.
    """

    statistic: float
    degrees: int
    p_value: float
    total_variation: float


def homogeneity(
    strata: Sequence[tuple[Counts, Counts]], least_expected: float = LEAST_EXPECTED
) -> Homogeneity:
    """Test two samples, given as counts of each outcome in every stratum.

    Args:
        strata: counts of both samples.
        least_expected: outcomes of a pool in the smaller sample, by expectation.

    Raises:
        ValueError: a stratum in which a sample is empty, or a negative count.
    """
    statistic, degrees, distance, size = 0.0, 0, 0.0, 0
    for one, other in strata:
        first, second = sum(one.values()), sum(other.values())
        if not first or not second:
            raise ValueError(f"a stratum has {first} and {second} outcomes: each sample needs some")
        if min(*one.values(), *other.values()) < 0:
            raise ValueError("counts are not negative")
        pools = _pools(one, other, least_expected * (first + second) / min(first, second))
        both = first + second
        for a, b in pools:
            share = (a + b) / both
            statistic += (a - first * share) ** 2 / (first * share)
            statistic += (b - second * share) ** 2 / (second * share)
            distance += abs(a / first - b / second) / 2 * both
        degrees += len(pools) - 1
        size += both
    return Homogeneity(statistic, degrees, chi_square_tail(statistic, degrees), distance / size)


def _pools(one: Counts, other: Counts, least: float) -> list[tuple[int, int]]:
    """Counts of both samples in each pool; together they are at least ``least``."""
    cells = {key: (one.get(key, 0), other.get(key, 0)) for key in {*one, *other}}
    # Equal totals in an order that no sample decides.
    order = sorted(cells, key=lambda key: (-sum(cells[key]), str(key)))
    pools: list[tuple[int, int]] = []
    a = b = 0
    for key in order:
        a, b = a + cells[key][0], b + cells[key][1]
        if a + b >= least:
            pools.append((a, b))
            a = b = 0
    if a + b and pools:
        last = pools.pop()
        pools.append((last[0] + a, last[1] + b))
    elif a + b:
        pools.append((a, b))
    return pools


def chi_square_tail(statistic: float, degrees: int) -> float:
    """Chance that a chi-square variable with ``degrees`` of freedom is at least ``statistic``."""
    if degrees == 0:
        return 1.0
    half = torch.tensor([degrees / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's adjusted p-values, in the order given."""
    order = sorted(range(len(p_values)), key=lambda i: p_values[i])
    adjusted, largest = [0.0] * len(p_values), 0.0
    for rank, i in enumerate(order):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[i]))
        adjusted[i] = largest
    return adjusted
