"""What :mod:`frspec_kernels.sampling_proposal` computes, in PyTorch with float64.

Once for a single list, as the rule is said, and once for all lists together, as a CPU serves it.
"""

import torch
from torch import Tensor

from . import sampling_random_reference as random
from .sampling_proposal import Children
from .sampling_proposal_kernels import LEAST_WEIGHT


def draw_children_reference(
    probs: Tensor,
    token_ids: Tensor,
    temperature: float,
    seed: int,
    position: int,
    depth: int,
    branch: int,
    children: int,
    fixed: int,
) -> tuple[list[int], list[float], Tensor]:
    """One list of :func:`frspec_kernels.sampling_proposal.draw_children`: children, scores, q."""
    if temperature == 0:
        q = probs.double()
        return token_ids[:children].tolist(), q[:children].tolist(), q
    weights = (probs.double() / probs[0].double()) ** (1 / temperature)
    weights[weights < LEAST_WEIGHT.value] = 0
    q = weights / weights.sum()
    word = random.words_of_ids(seed, token_ids, position, random.DRAW, depth, branch)
    speeds = q / random.exponential(word)
    speeds[q == 0] = -1
    speeds[:fixed] = -2
    places = speeds.argsort(descending=True, stable=True)[: children - fixed]
    order = [*range(fixed), *places.tolist()]
    scores, left = q[:fixed].tolist(), float(q[fixed:].sum())
    for place in order[fixed:]:
        scores.append(left)
        left -= float(q[place])
    return [int(token_ids[i]) for i in order], scores, q


def draw_children_on_cpu(
    probs: Tensor,
    token_ids: Tensor,
    temperatures: Tensor,
    seeds: Tensor,
    seq_lens: Tensor,
    depth: int,
    *,
    children: int,
    fixed: int,
) -> Children:
    """:func:`frspec_kernels.sampling_proposal.draw_children` without a GPU, for all lists."""
    rows, width = probs.shape
    lists = rows // seq_lens.shape[0]

    def each(of_request: Tensor) -> Tensor:
        return of_request.repeat_interleave(lists)[:, None]

    greedy = each(temperatures < torch.finfo(torch.float32).tiny)
    p = torch.where(probs > 0, probs.double(), 0.0)
    best = p.amax(1, keepdim=True).clamp(min=1e-300)
    heat = torch.where(greedy, 1.0, each(temperatures.double()))
    # 0 stays 0 at an infinite temperature too.
    tempered = ((p / best) ** (1 / heat)).where(p > 0, 0.0)
    weights = torch.where(greedy, p, tempered.where(tempered >= LEAST_WEIGHT.value, 0.0))
    total = weights.sum(1, keepdim=True)
    q = torch.where(greedy | (total <= 0), weights, weights / total.clamp(min=1e-300))
    branch = (torch.arange(rows, device=probs.device) % lists)[:, None]
    word = random.words_of_ids(
        each(seeds), token_ids, each(seq_lens.long()), random.DRAW, depth, branch
    )
    order = -1.0 - torch.arange(width, device=probs.device)
    speeds = torch.where(greedy, q, q / random.exponential(word)).where(q > 0, order)
    speeds[:, :fixed] = torch.inf
    place = speeds.argsort(dim=1, descending=True, stable=True)[:, :children]
    place[:, :fixed] = torch.arange(fixed, device=probs.device)
    shares = q.gather(1, place)
    drawn = shares[:, fixed:]
    left = q[:, fixed:].sum(1, keepdim=True) - drawn.cumsum(1) + drawn
    shares[:, fixed:] = torch.where(greedy, drawn, left.clamp(min=0))
    return Children(token_ids.gather(1, place), shares.float(), q.float())
