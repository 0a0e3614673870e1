"""First tokens of 2²⁰ cycles over large vocabularies: the tail, and mass that no map can propose.

A root with its draft's best candidate as a fixed child and one drawn from the rest of its list. The
target follows Zipf's law over an order of the ids that the map knows nothing of. Chi-square over
pools of at least six expected, and total variation over the same pools; a right implementation
passes each with all but 1e-6 of seeds. On a CPU 1,024 ids, in vectorised PyTorch with the kernels'
random numbers; on a GPU 128,256 ids, the kernels themselves, with and without truncation.
"""

from typing import NamedTuple

import pytest
import torch

from frspec_kernels import sampling_random_reference as random
from frspec_kernels.sampling import DraftLists, Sampling, accept_sampled
from frspec_kernels.sampling_proposal import draw_children
from frspec_kernels.sampling_reference import target_distribution
from tests.kernels.sampling_problem import DEVICE
from tests.kernels.sampling_simulation import numbers, race
from tests.kernels.test_sampling_statistics import (
    RARE,
    SAMPLES,
    chi_square_deviate,
    seeds_from,
    total_variation_bound,
)

POSITION, FIXED = 4095, 1
LEAST_EXPECTED = 6.0


class World(NamedTuple):
    logits: torch.Tensor  # [V] float32
    ids: torch.Tensor  # [C] int64: the draft's candidates, best first, all in the map
    q: torch.Tensor  # [C] float32


def world(vocab, hot, width, seed) -> World:
    """The map is the ids below ``hot``."""
    g = torch.Generator().manual_seed(seed)
    rank = torch.randperm(vocab, generator=g)
    logits = -1.1 * (rank + 1.0).log() + 0.3 * torch.randn(vocab, generator=g)
    drafted = (logits + 0.5 * torch.randn(vocab, generator=g))[:hot]
    best = drafted.softmax(-1).topk(width)
    return World(logits, best.indices, best.values / best.values.sum())


def pooled(counts, p):
    """Observed and expected counts, ids in the order of their probability until a pool is full."""
    expected = p * SAMPLES
    assert counts[expected == 0].sum() == 0, "a token of probability 0 came out"
    order = expected.argsort(descending=True)
    pool = (expected[order].cumsum(0) / LEAST_EXPECTED).long()
    observed, wanted = torch.zeros(2, int(pool[-1]) + 1, dtype=torch.float64)
    observed.index_add_(0, pool, counts[order])
    wanted.index_add_(0, pool, expected[order])
    few = (wanted > 0) & (wanted < LEAST_EXPECTED)
    for place in few.nonzero().flatten().tolist():  # the rest of a large pool, or the last one
        wanted[0] += wanted[place]
        observed[0] += observed[place]
    keep = (wanted > 0) & ~few
    return observed[keep], wanted[keep]


def assert_distributed(counts, p):
    observed, wanted = pooled(counts, p)
    assert int(counts.sum()) == SAMPLES
    assert chi_square_deviate(observed, wanted) < RARE
    distance = float((observed - wanted).abs().sum()) / 2 / SAMPLES
    assert distance < total_variation_bound(wanted, SAMPLES)


def simulated(world, seeds, p):
    """First tokens [R], and which child was accepted: 0 fixed, 1 drawn, 2 none."""
    ids, q = world.ids, world.q.double()
    zero, one = torch.zeros(1, dtype=torch.int64), torch.ones(1, dtype=torch.int64)
    behind = ids[FIXED:].expand(len(seeds), -1)
    shares = (q[FIXED:] / q[FIXED:].sum()).expand(len(seeds), -1)
    place = race(shares, seeds, behind, POSITION, random.DRAW, 0, zero)
    drawn = behind.gather(1, place[:, None])[:, 0]
    coins = [
        random.uniform(numbers(seeds, zero, POSITION, random.ACCEPT, 0, branch))
        for branch in (zero, one)
    ]
    left = p.clone()
    left[ids[0]] = 0
    left /= left.sum()
    proposed = torch.zeros_like(p).scatter(0, ids[FIXED:], shares[0])
    takes_fixed = coins[0] < p[ids[0]]
    takes_drawn = coins[1] * proposed[drawn] < left[drawn]
    which = torch.where(takes_fixed, 0, torch.where(takes_drawn, 1, 2))
    tokens = torch.where(takes_fixed, ids[0], drawn)
    tokens[which == 2] = last_tokens((left - proposed).clamp(min=0), seeds[which == 2])
    return tokens, which


def last_tokens(residual, seeds):
    """Winners [R] of the race over the whole residual [V], a multiple of four long."""
    vocab = len(residual)
    lane = torch.arange(vocab // 4).expand(len(seeds), -1)
    position, purpose = (torch.full_like(lane, x) for x in (POSITION, random.RESIDUAL))
    counter = lane, position, purpose, torch.zeros_like(lane)
    key = seeds[:, None].expand_as(lane)
    words = random.philox(counter, (key & 0xFFFFFFFF, (key >> 32) & 0xFFFFFFFF))
    words = words.permute(1, 2, 0).reshape(-1, vocab)
    return (residual / random.exponential(words)).argmax(-1)


def kernels(world, seeds, sampling_kind=(1.0, 0, 1.0, 0.0)):
    """First tokens of the kernels, and how many nodes were accepted; one row for all requests."""
    batch, device = len(seeds), DEVICE
    seeds = seeds.to(device)
    lens = torch.full_like(seeds, POSITION)

    def each(row, dtype):
        return torch.tensor([row], dtype=dtype, device=device).expand(batch, -1).contiguous()

    def every(value, dtype=torch.float32):
        return torch.full((batch,), value, dtype=dtype, device=device)

    q, ids = (x.to(device).expand(batch, -1).contiguous() for x in (world.q, world.ids))
    children = draw_children(q, ids, every(1.0), seeds, lens, 0, children=2, fixed=FIXED)
    tokens = torch.cat([torch.zeros_like(lens)[:, None], children.token_ids], 1)
    lists = DraftLists(
        each([0, 0, 1], torch.int8), each([0, -1, -1], torch.int32), ids[:, None],
        children.q[:, None], FIXED,
    )  # fmt: skip
    t, k, top_p, min_p = sampling_kind
    truncates = (k, top_p, min_p) != (0, 1.0, 0.0)
    sampling = Sampling(
        every(t), every(k, torch.int32), every(top_p), every(min_p), seeds, truncates
    )
    logits = world.logits.to(device).expand(batch * 3, -1)
    parents = each([-1, 0, 0], torch.int32)
    got = accept_sampled(logits, tokens, parents, lens, 2, sampling, lists=lists)
    return got.path_tokens[:, 0].cpu(), got.accept_lens.cpu()


def test_a_million_first_tokens():
    small = world(1024, 256, 16, 1)
    p = small.logits.double().softmax(0)
    assert float(p[256:].sum()) > 0.3
    counts, ways = torch.zeros(1024, dtype=torch.float64), torch.zeros(3)
    for seeds in seeds_from(11, SAMPLES).split(1 << 8):
        tokens, which = simulated(small, seeds, p)
        counts += torch.bincount(tokens, minlength=1024)
        ways += torch.bincount(which, minlength=3)
    assert float(ways.min()) > 0.1 * SAMPLES
    assert_distributed(counts, p)


def test_too_much_mass_off_the_map_would_be_noticed():
    """A twentieth more of the target's mass off the map: beyond the threshold."""
    p = world(1024, 256, 16, 1).logits.double().softmax(0)
    wrong = p.clone()
    wrong[256:] *= 1.05
    g = torch.Generator().manual_seed(2)
    tokens = torch.multinomial(wrong, SAMPLES, replacement=True, generator=g)
    observed, wanted = pooled(torch.bincount(tokens, minlength=1024).double(), p)
    assert chi_square_deviate(observed, wanted) > RARE


def test_the_kernels_are_the_simulation():
    small = world(1024, 256, 16, 1)
    seeds = seeds_from(5, 20000 if DEVICE == "cuda" else 48)
    tokens, which = simulated(small, seeds, small.logits.double().softmax(0))
    got, accepted = kernels(small, seeds)
    same = (got == tokens) & (accepted == torch.where(which < 2, 2, 1))
    # float32 decides otherwise within 1e-6 of a chance
    assert float(same.float().mean()) > (0.999 if DEVICE == "cuda" else 0.97)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "kind", [(1.0, 0, 1.0, 0.0), (0.8, 0, 0.95, 0.0), (1.3, 4000, 0.99, 1e-5)], ids=str
)
def test_a_million_first_tokens_of_128k_ids(kind):
    vocab = 128_256
    large = world(vocab, 32_768, 32, 3)
    t, k, top_p, min_p = kind
    p = target_distribution(large.logits.double(), t, k or None, top_p, min_p)
    # Candidates of a truncating request take 8 bytes an id.
    parts = seeds_from(17, SAMPLES).split(1 << 14 if kind[1:] == (0, 1.0, 0.0) else 1 << 11)
    counts, accepted = torch.zeros(vocab, dtype=torch.float64), 0
    for seeds in parts:
        tokens, lens = kernels(large, seeds, kind)
        counts += torch.bincount(tokens, minlength=vocab)
        accepted += int((lens > 1).sum())
    assert 0.05 * SAMPLES < accepted < 0.95 * SAMPLES
    assert_distributed(counts, p)
