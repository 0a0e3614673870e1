"""Replies against the target's own probabilities: what passes, and what is noticed."""

from collections import Counter
from types import SimpleNamespace

import pytest
import torch

from bench.homogeneity import chi_square_tail
from examples.smollm2_135m.sampled_exact import expected, goodness, rows_of_arm

VOCAB, REPLIES = 60, 4000
PROMPT = [3, 7]


def markov(seed):
    """A model whose next token follows from the last one."""
    table = 1.5 * torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(seed))
    return lambda ids, logits_to_keep: SimpleNamespace(logits=table[ids]), table.double()


@pytest.mark.parametrize("contexts", [VOCAB, 20])
def test_expected_probabilities(contexts):
    model, table = markov(1)
    for heat, found in zip((1.0, 0.5), expected(model, PROMPT, [1.0, 0.5], contexts), strict=True):
        step = (table / heat).softmax(-1)
        torch.testing.assert_close(found.first, step[7])
        kept = table[7].topk(contexts).indices
        weights = torch.zeros(VOCAB, dtype=torch.float64)
        weights[kept] = step[7][kept] / step[7][kept].sum()
        torch.testing.assert_close(found.second, weights @ step)
        assert found.begins == set(kept.tolist())


def replies(table, heat, generator, second_heat=None):
    first = torch.multinomial((table[7] / heat).softmax(-1), REPLIES, True, generator=generator)
    following = (table[first] / (second_heat or heat)).softmax(-1)
    second = torch.multinomial(following, 1, generator=generator)[:, 0]
    pairs = zip(first.tolist(), second.tolist(), strict=True)
    return Counter(f"{a},{b},0" for a, b in pairs)


def rows_of(second_heat):
    model, table = markov(2)
    targets = expected(model, PROMPT, [0.7], 30)
    g = torch.Generator().manual_seed(3)
    arm = {
        "arm": "drawn",
        "map_size": 8192,
        "counts": {"T 0.7": [replies(table, 0.7, g, second_heat)]},
    }
    return rows_of_arm(arm, "T 0.7", targets)


def test_the_targets_own_replies_pass():
    rows = rows_of(None)
    assert [row[2:4] for row in rows] == [
        ["token 1", "few"], ["token 1", "many"], ["token 2", "few"], ["token 2", "many"],
    ]  # fmt: skip
    assert rows[0][4] == REPLIES
    assert 0.9 * REPLIES < rows[2][4] < REPLIES  # those that begin with a likely token
    assert min(row[-1] for row in rows) > 0.01


def test_a_second_token_at_another_temperature_is_noticed():
    p_values = [row[-1] for row in rows_of(0.8)]
    assert min(p_values[:2]) > 0.01
    assert max(p_values[2:]) < 1e-4


def test_the_statistic_of_pools():
    p = torch.tensor([0.1, 0.6, 0.05, 0.25], dtype=torch.float64)
    counts = {"1": 50, "3": 30, "0": 15, "2": 5}
    # In the order of p: 60, 25, 10 and 5 are expected.
    assert goodness(counts, p, 5) == (
        pytest.approx(10**2 / 60 + 5**2 / 25 + 5**2 / 10 + 0),
        3,
    )
    assert goodness(counts, p, 12) == (pytest.approx(10**2 / 60 + 5**2 / 25 + 5**2 / 15), 2)
    assert goodness(counts, p, 1000) == (0, 0)


def test_p_values_of_right_samples_are_uniform():
    g = torch.Generator().manual_seed(5)
    p = torch.rand(40, generator=g, dtype=torch.float64).softmax(-1)
    found = []
    for _ in range(400):
        sample = torch.multinomial(p, 1000, True, generator=g).tolist()
        found.append(chi_square_tail(*goodness(Counter(map(str, sample)), p, 5)))
    for level in (0.1, 0.5, 0.9):
        share = sum(x <= level for x in found) / 400
        assert share == pytest.approx(level, abs=0.08)  # three and more of its errors
