"""A million cycles at once: the rule of docs/sampling.md over tables, in vectorised PyTorch.

A cycle drafts two levels. Every node has its best candidate as a fixed child and one drawn from the
rest of its list. Contexts are "nothing" (row 0 of the tables) and each first token (row token + 1).
``bug`` plants one of the mistakes that the statistics must notice.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from frspec_kernels import sampling_random_reference as random

FIXED = 1
POSITION = 100
BUGS = (
    "forgets the residual",
    "normalises over the map only",
    "reuses a random number",
    "skips a sibling",
    "takes the list of another parent",
)


class Tables(NamedTuple):
    p: Tensor  # [V + 1, V] float64: the target's distribution in each context
    ids: Tensor  # [V + 1, C] int64: the draft's candidates, best first, all in the map
    q: Tensor  # [V + 1, C] float64


def tables(vocab=11, hot=7, width=5, seed=2) -> Tables:
    """The target favours tokens off the map in some contexts; one probability is 0."""
    g = torch.Generator().manual_seed(seed)
    logits = 1.2 * torch.randn(vocab + 1, vocab, generator=g, dtype=torch.float64)
    logits[torch.arange(vocab + 1), torch.arange(vocab + 1) % vocab] = -torch.inf
    drafted = logits.clone()
    drafted[:, hot:] = -torch.inf
    noise = torch.randn(logits.shape, generator=g, dtype=torch.float64)
    q = (drafted.clamp(min=-4) + noise).where(drafted > -torch.inf, -torch.inf)
    q[:, :hot] = q[:, :hot].where(q[:, :hot] > -torch.inf, -4.0)
    best = q.softmax(-1).topk(width)
    return Tables(logits.softmax(-1), best.indices, best.values)


def numbers(seeds, lane, position, purpose, depth, branch):
    """[R, …] words for seeds [R]; ``lane`` and ``branch`` broadcast against them."""
    shape = torch.broadcast_shapes(seeds.shape, lane.shape, branch.shape)

    def wide(x):
        return torch.as_tensor(x).expand(shape)

    counter = wide(lane // 4), wide(position), wide(depth * 4 + purpose), wide(branch)
    four = random.philox(counter, (seeds & 0xFFFFFFFF, (seeds >> 32) & 0xFFFFFFFF))
    return four.gather(0, (lane % 4).expand(shape)[None])[0]


def race(weights, seeds, ids, position, purpose, depth, branch):
    """Place of the winner among ids [R, n]."""
    words = numbers(seeds[:, None], ids, position, purpose, depth, branch)
    speeds = weights / random.exponential(words)
    return speeds.argmax(-1)


def draw(tables, context, seeds, depth, branch):
    """Tokens [R] drawn from the lists of ``context`` [R] without the fixed candidates."""
    ids, q = tables.ids[context, FIXED:], tables.q[context, FIXED:]
    place = race(q, seeds, ids, POSITION, random.DRAW, depth, branch)
    return ids.gather(1, place[:, None])[:, 0]


def verify(tables, context, drawn, seeds, position, depth, bug=None):
    """Accepted child (0 fixed, 1 drawn, 2 none) and the token, both [R]."""
    rows, vocab = torch.arange(len(seeds)), tables.p.shape[1]
    p, fixed = tables.p[context].clone(), tables.ids[context, 0]
    if bug == "normalises over the map only":
        on_map = torch.zeros(vocab, dtype=torch.bool)
        on_map[tables.ids.unique()] = True
        p = p.where(on_map, 0)
        p /= p.sum(-1, keepdim=True)
    lists = context
    if bug == "takes the list of another parent":
        lists = (context + 1) % len(tables.p)
    zero, one = torch.zeros(1, dtype=torch.int64), torch.ones(1, dtype=torch.int64)
    coins = [
        random.uniform(numbers(seeds, zero, position, random.ACCEPT, depth, branch))
        for branch in (zero, one)
    ]
    if bug == "reuses a random number":
        coins[1] = coins[0]
    takes_fixed = coins[0] < p[rows, fixed]
    if bug == "skips a sibling":
        takes_fixed &= False
    p[rows, fixed] = 0
    left = p / p.sum(-1, keepdim=True).clamp(min=1e-300)
    proposed = torch.zeros_like(left)
    shares = tables.q[lists, FIXED:]
    proposed.scatter_(1, tables.ids[lists, FIXED:], shares / shares.sum(-1, keepdim=True))
    takes_drawn = ~takes_fixed & (coins[1] * proposed[rows, drawn] < left[rows, drawn])
    residual = left if bug == "forgets the residual" else (left - proposed).clamp(min=0)
    ids = torch.arange(vocab).expand(len(seeds), -1)
    last = race(residual, seeds, ids, position, random.RESIDUAL, depth, zero)
    token = torch.where(takes_fixed, fixed, torch.where(takes_drawn, drawn, last))
    return torch.where(takes_fixed, 0, torch.where(takes_drawn, 1, 2)), token


def sample(tables, context, seeds, position, depth):
    """A token [R] of the target's own."""
    ids = torch.arange(tables.p.shape[1]).expand(len(seeds), -1)
    zero = torch.zeros(1, dtype=torch.int64)
    return race(tables.p[context], seeds, ids, position, random.RESIDUAL, depth, zero)


class Drafts(NamedTuple):
    """Tokens [R] of the tree: the root's children, then the drawn children of each."""

    fixed: Tensor
    drawn: Tensor
    below_fixed: Tensor
    below_drawn: Tensor


def draft(tables, seeds) -> Drafts:
    """The nodes of both levels; the branch is the node's index in its level."""
    zero, one = torch.zeros(1, dtype=torch.int64), torch.ones(1, dtype=torch.int64)
    root = torch.zeros_like(seeds)
    fixed, drawn = tables.ids[root, 0], draw(tables, root, seeds, 0, zero)
    below = [
        draw(tables, token + 1, seeds, 1, branch) for token, branch in ((fixed, zero), (drawn, one))
    ]
    return Drafts(fixed, drawn, *below)


def two_tokens(tables, seeds, bug=None):
    """First and second token of each request, [R, 2]; and the accepted nodes below the root."""
    parts = [_two_tokens(tables, part, bug) for part in seeds.split(1 << 14)]
    pairs, accepted = zip(*parts, strict=True)
    return torch.cat(pairs), torch.cat(accepted)


def _two_tokens(tables, seeds, bug):
    drafts = draft(tables, seeds)
    root = torch.zeros_like(seeds)
    which, first = verify(tables, root, drafts.drawn, seeds, POSITION, 0, bug)
    below = torch.where(which == 0, drafts.below_fixed, drafts.below_drawn)
    which_below, second = verify(tables, first + 1, below, seeds, POSITION, 1, bug)
    again = sample(tables, first + 1, seeds, POSITION + 1, 0)
    accepted = (which < 2).long() + ((which < 2) & (which_below < 2)).long()
    return torch.stack([first, torch.where(which < 2, second, again)], 1), accepted
