"""The two-sample test: known values, uniform p-values without a difference, power with one."""

from collections import Counter

import pytest
import torch

from bench.homogeneity import chi_square_tail, holm, homogeneity


@pytest.mark.parametrize(
    ("statistic", "degrees", "tail"),
    # From printed tables of the chi-square distribution.
    [(3.841, 1, 0.05), (6.635, 1, 0.01), (18.307, 10, 0.05), (124.342, 100, 0.05), (0.0, 3, 1.0)],
)
def test_the_tail_is_that_of_the_tables(statistic, degrees, tail):
    assert chi_square_tail(statistic, degrees) == pytest.approx(tail, rel=2e-3)


def test_a_two_by_two_table():
    """By hand: 60 and 40 of 100 against 40 and 60 are (10² / 50) · 4."""
    found = homogeneity([({"a": 60, "b": 40}, {"a": 40, "b": 60})])
    assert found.statistic == pytest.approx(8.0)
    assert found.degrees == 1
    assert found.p_value == pytest.approx(0.00468, rel=1e-2)
    assert found.total_variation == pytest.approx(0.2)


def test_rare_outcomes_are_pooled():
    """1,000 and 1,000: cells below 10 in both together are joined, the last joins the one before.

    Order: a 1,900, b 60, c 12, then 8 + 8 (16, a pool), then 8 + 4, which make 12 more.
    """
    one = {"a": 950, "b": 30, "c": 6, "d": 8, "e": 0, "f": 4, "g": 2}
    other = {"a": 950, "b": 30, "c": 6, "d": 0, "e": 8, "f": 4, "g": 2}
    found = homogeneity([(one, other)])
    assert (found.statistic, found.degrees) == (0.0, 4)
    fewer = {**one, "g": 0}, {**other, "g": 0}
    assert homogeneity([fewer]).degrees == 3


def test_strata_add_up():
    one, other = {"a": 60, "b": 40}, {"a": 40, "b": 60}
    both = homogeneity([(one, other), (other, one)])
    assert both.statistic == pytest.approx(16.0)
    assert both.degrees == 2
    # Pooled without strata they would hide each other.
    assert homogeneity([({"a": 100, "b": 100}, {"a": 100, "b": 100})]).statistic == 0


def samples(p, size, generator):
    drawn = torch.multinomial(p, size, replacement=True, generator=generator)
    return Counter(drawn.tolist())


def zipf(outcomes):
    p = 1.0 / torch.arange(1, outcomes + 1, dtype=torch.float64) ** 1.2
    return p / p.sum()


def test_p_values_are_uniform_where_nothing_differs():
    """400 pairs, 3,000 against 5,000 of 2,000 outcomes: Kolmogorov's distance at 1e-4 is 0.107."""
    g = torch.Generator().manual_seed(3)
    p = zipf(2000)
    found = [homogeneity([(samples(p, 3000, g), samples(p, 5000, g))]).p_value for _ in range(400)]
    ordered = torch.tensor(sorted(found), dtype=torch.float64)
    steps = torch.arange(1, 401, dtype=torch.float64) / 400
    assert float(
        torch.maximum((steps - ordered).abs(), (ordered - steps + 1 / 400).abs()).max()
    ) < (2.23 / 400**0.5)


@pytest.mark.parametrize("seed", range(5))
def test_four_per_cent_moved_are_noticed(seed):
    """20,000 against 20,000: mass 0.04 moves from the three likeliest outcomes to the next five."""
    g = torch.Generator().manual_seed(seed)
    p = zipf(500)
    q = p.clone()
    q[:3] -= 0.04 * p[:3] / p[:3].sum()
    q[3:8] += 0.04 * p[3:8] / p[3:8].sum()
    found = homogeneity([(samples(p, 20000, g), samples(q, 20000, g))], least_expected=200)
    assert found.p_value < 1e-4
    assert found.total_variation > 0.03


def test_holm():
    """An example by hand: 4 · 0.005, then 3 · 0.01, 2 · 0.03 and 0.04, never falling."""
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.6, 0.7]) == [1.0, 1.0]
    assert holm([]) == []


def test_nothing_to_compare():
    assert homogeneity([({"a": 7}, {"a": 9})])[:3] == (0.0, 0, 1.0)
    with pytest.raises(ValueError, match="each sample needs some"):
        homogeneity([({"a": 7}, {})])
    with pytest.raises(ValueError, match="not negative"):
        homogeneity([({"a": 7, "b": -1}, {"a": 1})])
