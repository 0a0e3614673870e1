"""Counting of tokens outside the map: against plain loops, and what is refused."""

import pytest
import torch

from frspec_kernels.map_tally import tally, tally_reference
from tests.kernels.attention_problem import DEVICE


def problem(batch, columns, vocab, seed):
    g = torch.Generator().manual_seed(seed)
    tokens = torch.randint(vocab, (batch, columns), generator=g, dtype=torch.int32)
    lens = torch.randint(columns + 1, (batch,), generator=g, dtype=torch.int32)
    rows = torch.randint(3, (batch,), generator=g)  # a third is padding
    hot = torch.rand(vocab, generator=g) < 0.6
    return [tensor.to(DEVICE) for tensor in (tokens, lens, rows, hot)]


def by_hand(tokens, lens, rows, hot):
    counts = [0, 0, 0]
    for row, line, length in zip(rows.tolist(), tokens.tolist(), lens.tolist(), strict=True):
        if row:
            counts[0] += 1
            counts[1] += length
            counts[2] += sum(not hot[token] for token in line[:length])
    return counts


@pytest.mark.parametrize("count", [tally, tally_reference], ids=["kernel", "reference"])
@pytest.mark.parametrize(("batch", "columns"), [(1, 2), (5, 16), (33, 60), (0, 4)])
def test_counts_add_up_over_rounds(count, batch, columns):
    totals = torch.tensor([7, 11, 2**40], device=DEVICE)
    expected = totals.tolist()
    for seed in (1, 2):
        given = problem(batch, columns, 500, seed)
        expected = [a + b for a, b in zip(expected, by_hand(*given), strict=True)]
        count(*given, totals)
    assert totals.tolist() == expected


def test_tokens_past_the_length_are_not_read():
    """They may be anything: a padded graph leaves what earlier rounds wrote."""
    tokens = torch.tensor([[3, 2**31 - 1, -5, 9]], dtype=torch.int32, device=DEVICE)
    totals = torch.zeros(3, dtype=torch.int64, device=DEVICE)
    lens = torch.ones(1, dtype=torch.int32, device=DEVICE)
    hot = torch.zeros(10, dtype=torch.bool, device=DEVICE)
    tally(tokens, lens, torch.ones(1, dtype=torch.int64, device=DEVICE), hot, totals)
    assert totals.tolist() == [1, 1, 1]


@pytest.mark.parametrize(
    ("at", "wrong", "error", "message"),
    [
        (0, torch.zeros(2, 4), TypeError, "tokens is torch.int32, got torch.float32"),
        (0, torch.zeros(4, 2, dtype=torch.int32).T, ValueError, "tokens is contiguous"),
        (1, torch.zeros(3, dtype=torch.int32), ValueError, "tokens is contiguous"),
        (2, torch.zeros(2, dtype=torch.int32), TypeError, "rows is torch.int64"),
        (4, torch.zeros(2, dtype=torch.int64), ValueError, r"totals is contiguous \[3\]"),
    ],
)
def test_refused(at, wrong, error, message):
    given = [
        torch.zeros(2, 4, dtype=torch.int32),
        torch.zeros(2, dtype=torch.int32),
        torch.zeros(2, dtype=torch.int64),
        torch.zeros(9, dtype=torch.bool),
        torch.zeros(3, dtype=torch.int64),
    ]
    given[at] = wrong
    with pytest.raises(error, match=message):
        tally(*given)
