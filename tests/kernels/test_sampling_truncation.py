"""Where truncation ends: the kernels' pivots against a sort in float64, row by row."""

from typing import NamedTuple

import pytest
import torch

from frspec_kernels import sampling_launch
from frspec_kernels.sampling import Sampling, accept_sampled, allocate_sampling_workspace
from tests.kernels.sampling_problem import DEVICE
from tests.kernels.tree_oracle import poison

ON_GPU = DEVICE == "cuda"
VOCAB = 128_256 if ON_GPU else 2503
# Float32 and the unit of integer masses may place a token that is this close to the end of top-p.
CLEAR = 1e-5
LEAST_MASS = 2.0**-40


class Row(NamedTuple):
    temperature: float
    top_k: int
    top_p: float
    min_p: float


ROWS = [
    Row(1.0, 0, 0.95, 0.0), Row(1.0, 0, 0.5, 0.0), Row(1.0, 0, 0.01, 0.0), Row(1.0, 0, 0.9999, 0.0),
    Row(3.0, 0, 0.95, 0.0), Row(0.3, 0, 0.95, 0.0), Row(1.0, 0, 1.0, 0.02), Row(1.0, 0, 1.0, 1.0),
    Row(1.0, 0, 0.8, 0.3), Row(1.0, 0, 0.3, 0.001), Row(1.0, 0, 0.95, 1e-9), Row(1.0, 7, 1.0, 0.0),
    Row(1.0, 30, 0.9, 0.01), Row(1.0, 700, 1.0, 0.0), Row(1.0, 700, 0.7, 0.0),
    Row(1.0, 2500, 0.9, 0.1), Row(1.0, VOCAB - 1, 1.0, 0.0), Row(1.0, VOCAB, 0.6, 0.0),
]  # fmt: skip
SHAPES = {
    "natural": lambda x, rank: x * 0.5 - 1.5 * (rank + 1.0).log(),
    "flat": lambda x, rank: x * 0.1,
    "bf16": lambda x, rank: (x * 0.5 - 1.5 * (rank + 1.0).log()).bfloat16().float(),
    "two values": lambda x, rank: (x > 0).float(),
    "equal": lambda x, rank: x * 0.0 - 3.0,
    "around zero": lambda x, rank: x * 1e-20,
    "few left": lambda x, rank: x.where(rank < 40, float("-inf")),
    "wide": lambda x, rank: x * 40.0,
}

DISTINCT = {"natural", "flat", "wide"}  # scores that hardly ever repeat, of different weights


def rows_of(shape, seed=0):
    """[len(ROWS), V] float32, each row over an order of its own."""
    g = torch.Generator().manual_seed(seed)
    noise = torch.randn(len(ROWS), VOCAB, generator=g)
    rank = torch.rand(len(ROWS), VOCAB, generator=g).argsort(-1).float()
    return SHAPES[shape](noise, rank)


def pivots_of(logits):
    """Pivot keys [rows] and numbers of collected keys [rows], from poisoned memory."""
    batch = len(ROWS)
    t, k, p, m = (torch.tensor(x, device=DEVICE) for x in zip(*ROWS, strict=True))
    none = torch.zeros(batch, dtype=torch.int64, device=DEVICE)
    sampling = Sampling(t.float(), k.int(), p.float(), m.float(), none)
    memory = poison(allocate_sampling_workspace(batch, 1, VOCAB, 1, DEVICE))
    parents = torch.full((batch, 1), -1, dtype=torch.int32, device=DEVICE)
    accept_sampled(
        logits.to(DEVICE), none[:, None], parents, none, 1, sampling, workspace=memory
    )  # fmt: skip
    return memory.pivots.cpu(), memory.counts.cpu()


def kept_by(logits, pivot):
    """[V] bool: ids whose key, the score's order above the inverted id, reaches the pivot."""
    bits = (logits + 0.0).view(torch.int32)
    order = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long()
    ids = torch.arange(len(logits))
    return ((order << 32) | (ids ^ 0x7FFFFFFF)) >= pivot


def kept_numbers(logits, row):
    """The least and the largest number of tokens that float32 may keep of the sorted ones."""
    ranked = logits.double().sort(descending=True, stable=True).values
    weights = ((ranked - ranked[0]) / row.temperature).exp()
    low = high = int((weights > LEAST_MASS).sum())
    if 1 < row.top_k < len(logits):
        low, high = min(low, row.top_k), min(row.top_k, int((weights > 0).sum()))
    if row.top_p < 1:
        share = weights[: max(high, 1)].cumsum(0) / weights[:high].sum()
        before = torch.cat([share.new_zeros(1), share[:-1]])
        top_p = torch.tensor(row.top_p).double()
        low = min(low, int((before < top_p - CLEAR).sum()))
        high = min(high, int((before < top_p + CLEAR).sum()))
    if row.min_p > 0:
        low = min(low, int((weights >= row.min_p * (1 + CLEAR)).sum()))
        high = min(high, int((weights >= row.min_p * (1 - CLEAR)).sum()))
    return max(low, 1), max(high, 1)


@pytest.fixture(autouse=True)
def several_parts(monkeypatch):
    if not ON_GPU:  # the interpreter is slow: a small row in as small parts
        monkeypatch.setattr(sampling_launch, "SLICE", 1024)


@pytest.mark.parametrize(("shape", "few"), [*((shape, 16) for shape in SHAPES), ("natural", 256)])
def test_what_is_kept_is_what_a_sort_keeps(shape, few, monkeypatch):
    """With room for few candidates, bisection has to bring their number down.

    Of distinct scores no more than a twentieth of the row is left to it; a min-p alone needs none,
    and a small top-k not many more than k.
    """
    monkeypatch.setattr(sampling_launch, "FEW", few)
    monkeypatch.setattr(sampling_launch, "SHRINK_FROM", 32 * few)
    logits = rows_of(shape)
    pivots, counts = pivots_of(logits)
    clear = 0
    for row, x, pivot, count in zip(ROWS, logits, pivots.tolist(), counts.tolist(), strict=True):
        kept = kept_by(x, pivot) & (((x - x.max()).double() / row.temperature).exp() > LEAST_MASS)
        low, high = kept_numbers(x, row)
        assert low <= int(kept.sum()) <= high, (row, low, int(kept.sum()), high)
        order = x.sort(descending=True, stable=True).indices
        assert bool(kept[order[: int(kept.sum())]].all()), row
        clear += high - low <= VOCAB // 1000
        if shape in DISTINCT:
            assert_short(row, count)
    assert clear >= len(ROWS) // 2, clear


def assert_short(row, count):
    if 1 < row.top_k <= VOCAB * sampling_launch.GROUPS // sampling_launch.SLICE:
        assert row.top_k <= count <= 3 * row.top_k + 16, (row, count)
    elif row.top_p < 1 and not 1 < row.top_k < VOCAB:
        assert count <= VOCAB // 20, (row, count)
    elif row.min_p > 0 and row.top_p == 1:
        assert count == 0, (row, count)


@pytest.mark.parametrize(("levels", "edges"), [(1, 8), (3, 32)])
def test_the_way_to_the_pivot_does_not_move_it(levels, edges, monkeypatch):
    logits = rows_of("natural", seed=1)
    expected, _ = pivots_of(logits)
    monkeypatch.setattr(sampling_launch, "LEVELS", levels)
    monkeypatch.setattr(sampling_launch, "EDGES", edges)
    got, _ = pivots_of(logits)
    for row, x, a, b in zip(ROWS, logits, expected.tolist(), got.tolist(), strict=True):
        assert torch.equal(kept_by(x, a), kept_by(x, b)), row


@pytest.mark.parametrize("offset", [1e5, -1e5])
def test_min_p_at_large_logits_keeps_no_score_below_it(offset):
    """The score of 0.1 lies between two float32, the nearer of which weighs 0.0998."""
    step = 2.0**-7
    logits = torch.full((4, 300), offset - 3.0)
    logits[:, 40], logits[:, 7], logits[:, 250] = offset, offset - 295 * step, offset - 294 * step
    none = torch.zeros(4, dtype=torch.int64, device=DEVICE)
    sampling = Sampling(
        torch.ones(4, device=DEVICE), torch.tensor([0, 200, 0, 200], device=DEVICE).int(),
        torch.tensor([1.0, 1.0, 0.9999, 0.9999], device=DEVICE), torch.full_like(none.float(), 0.1),
        none,
    )  # fmt: skip
    memory = poison(allocate_sampling_workspace(4, 1, 300, 1, DEVICE))
    parents = torch.full((4, 1), -1, dtype=torch.int32, device=DEVICE)
    accept_sampled(
        logits.to(DEVICE), none[:, None], parents, none, 1, sampling, workspace=memory
    )  # fmt: skip
    for row, pivot in zip(logits, memory.pivots.tolist(), strict=True):
        assert kept_by(row, pivot).nonzero().flatten().tolist() == [40, 250]
