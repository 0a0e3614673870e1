"""What :mod:`frspec_kernels.sampling` computes, in PyTorch with float64.

The same rule and the same random numbers; ``margin`` tells how clear each outcome was, for float32
decides as float64 does wherever the margin is above its rounding.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from . import sampling_random_reference as random
from .sampling_args import DraftLists, Sampling
from .sampling_reference import Proposal, sibling_rule, target_distribution
from .tree_args import Accepted


@dataclass(frozen=True)
class SampledPath:
    """One request's outcome.

    Attributes:
        nodes: accepted nodes, the root first.
        bonus: the token drawn after the last of them.
        margin: the smallest relative distance of any decision to its other outcome.
    """

    nodes: tuple[int, ...]
    bonus: int
    margin: float


@dataclass(frozen=True)
class Thresholds:
    """Acceptance thresholds; 1 is lossless. See :func:`frspec_kernels.sampling.accept_sampled`."""

    single: float = 1.0
    accumulated: float = 1.0


LOSSLESS = Thresholds()


def accept_sampled_reference(
    logits: Tensor,
    tokens: Tensor,
    parents: Tensor,
    seq_lens: Tensor,
    sampling: Sampling,
    lists: DraftLists | None = None,
    thresholds: Thresholds = LOSSLESS,
) -> list[SampledPath]:
    """:func:`frspec_kernels.sampling.accept_sampled` request by request, on visited rows only.

    Computes on the CPU, wherever the tensors are.
    """
    batch, nodes = tokens.shape
    rows = logits.view(batch, nodes, -1)
    tokens, parents, seq_lens = tokens.cpu(), parents.cpu(), seq_lens.cpu()
    t, k, p, m, seeds = (x.cpu() for x in sampling[:5])
    sampling = Sampling(t, k, p, m, seeds)
    if lists is not None:
        lists = DraftLists(*(x.cpu() for x in lists[:4]), fixed=lists.fixed)
    return [
        _walk(rows[b], tokens[b], parents[b], int(seq_lens[b]), b, sampling, lists, thresholds)
        for b in range(batch)
    ]


def accepted_on_cpu(
    logits: Tensor,
    tokens: Tensor,
    parents: Tensor,
    seq_lens: Tensor,
    max_path: int,
    sampling: Sampling,
    lists: DraftLists | None = None,
    thresholds: Thresholds = LOSSLESS,
) -> Accepted:
    """:func:`accept_sampled_reference` in the form of ``accept_sampled``'s outcome."""
    batch, nodes = tokens.shape
    index = torch.full((batch, max_path), -1, dtype=torch.int32)
    said = torch.zeros(batch, max_path, dtype=torch.int64)
    predicts = torch.zeros(batch * nodes, dtype=torch.int32)
    lens = torch.empty(batch, dtype=torch.int32)
    paths = accept_sampled_reference(logits, tokens, parents, seq_lens, sampling, lists, thresholds)
    for b, path in enumerate(paths):
        count = len(path.nodes)
        rows = torch.tensor(path.nodes) + b * nodes
        lens[b] = count
        index[b, :count] = rows.int()
        said[b, :count] = torch.tensor([*tokens[b, list(path.nodes[1:])].tolist(), path.bonus])
        predicts[rows] = said[b, :count].int()
    bonus = said.gather(1, lens[:, None].long() - 1)[:, 0]
    return Accepted(index, lens, predicts, said, bonus, seq_lens.long() + lens)


def _walk(
    logits: Tensor,
    tokens: Tensor,
    parents: Tensor,
    position: int,
    request: int,
    sampling: Sampling,
    lists: DraftLists | None,
    thresholds: Thresholds,
) -> SampledPath:
    path, margin = [0], float("inf")
    seed = int(sampling.seeds[request])
    while True:
        node, depth = path[-1], len(path) - 1
        p = _target(logits[node].cpu(), sampling, request)
        children = (parents == node).nonzero().flatten()
        children = children[children > 0]
        proposal = _proposal(node, tokens, children, request, lists)
        chances, left = _rule(p, proposal, thresholds)
        ordinals = torch.arange(len(children))
        words = random.words(
            seed, torch.zeros_like(ordinals), position, random.ACCEPT, depth, ordinals
        )
        accepted = -1
        for child, chance, coin in zip(
            children.tolist(), chances, random.uniform(words[0]).tolist(), strict=True
        ):
            margin = min(margin, abs(chance - coin) / max(chance, 1e-9))
            if coin < chance:
                accepted = child
                break
        if accepted < 0:
            bonus, clear = race(left if left.sum() > 0 else p, seed, position, depth)
            return SampledPath(tuple(path), bonus, min(margin, clear))
        path.append(accepted)


def _target(row: Tensor, sampling: Sampling, request: int) -> Tensor:
    top_k = int(sampling.top_ks[request])
    return target_distribution(
        row.double(),
        float(sampling.temperatures[request]),
        top_k if 1 <= top_k < len(row) else None,
        float(sampling.top_ps[request]),
        float(sampling.min_ps[request]),
    )


def _proposal(
    node: int, tokens: Tensor, children: Tensor, request: int, lists: DraftLists | None
) -> Proposal:
    """The node's children; without a list they are the list, all fixed."""
    own = tokens[children]
    if lists is None or not bool(lists.drawn[request, children].any()):
        return Proposal(own, torch.ones(len(own)), len(own), tuple(own.tolist()))
    row = int(lists.rows[request, node])
    ids, q = lists.ids[request, row], lists.q[request, row].double()
    return Proposal(ids[ids >= 0], q[ids >= 0], lists.fixed, tuple(own.tolist()))


def _rule(p: Tensor, proposal: Proposal, thresholds: Thresholds) -> tuple[list[float], Tensor]:
    """:func:`sibling_rule`, with the thresholds' larger chances where all children are fixed."""
    chances, left = sibling_rule(p, proposal)
    if thresholds == LOSSLESS:
        return chances, left
    before, relaxed = 0.0, []
    for token in proposal.children:
        single = float(p[token])
        rest = thresholds.accumulated - before
        sure = rest <= single or single >= thresholds.single
        relaxed.append(0.0 if single == 0 else 1.0 if sure else single / rest)
        before += single
    return relaxed, left


def race(weights: Tensor, seed: int, position: int, depth: int) -> tuple[int, float]:
    """Token with the largest weight / exponential number, and by what share it won."""
    ids = weights.nonzero().flatten()
    word = random.words_of_ids(seed, ids, position, random.RESIDUAL, depth)
    speeds = weights[ids] / random.exponential(word)
    best = speeds.topk(min(2, len(ids)))
    clear = float(1 - best.values[1] / best.values[0]) if len(ids) > 1 else 1.0
    return int(ids[best.indices[0]]), clear
