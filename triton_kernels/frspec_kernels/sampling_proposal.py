# pyright: reportCallIssue=false, reportArgumentType=false
"""Children to verify at temperature > 0, from the draft head's own list.

The head returns a row's C best candidates with their probabilities. The draft's distribution is
this list, tempered and renormalised:

    q(x) = p(x)^(1/T) / Σ p^(1/T)

Any q is exact (``docs/sampling.md``), so the cut costs accepted tokens only. The first ``fixed``
candidates are children as they are; the other ``children - fixed`` are drawn without replacement
from the rest, by an exponential race over the numbers of q. Where the rest has too few candidates
of probability above 0, the last children are the next ones in the list's order, by no draw; weights
below 2^-100 of the best one's count as 0. A place's score is what is known before its draw: q of a
fixed child, the mass that is left to draw from for a drawn one. A greedy request draws nothing: its
children are the best candidates and their scores the head's probabilities.

Letters: B requests, L lists of a request at this step (1 at the root, then one for each beam), C
candidates of a list, K children. The lists of a tree with K children, of :class:`DraftLists`, stand
step after step: the root's, then those of each step's K beams.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from .pdl import pdl_options
from .sampling_args import MAX_LIST, DraftLists
from .sampling_proposal_kernels import draw_children_kernel
from .tree_args import INDEX_TYPES, check_tensor
from .tree_launch import block_of


class Children(NamedTuple):
    """A step's proposals."""

    token_ids: Tensor  # [B * L, K] int64: fixed children, then drawn ones as they were drawn
    scores: Tensor  # [B * L, K] float32, in [0, 1]; what a place's selection may depend on
    q: Tensor  # [B * L, C] float32: the list's probabilities, summing to 1 unless greedy


def draw_children(
    probs: Tensor,
    token_ids: Tensor,
    temperatures: Tensor,
    seeds: Tensor,
    seq_lens: Tensor,
    depth: int,
    *,
    children: int,
    fixed: int,
    out: Children | None = None,
) -> Children:
    """Choose each list's children.

    Args:
        probs: ``[B * L, C]`` float32, the draft's, best first; 0 for a missing candidate.
        token_ids: ``[B * L, C]`` int64, distinct in a row.
        temperatures: ``[B]`` float32; 0 is greedy.
        seeds: ``[B]`` int64.
        seq_lens: ``[B]`` tokens before the root, int64 or int32.
        depth: of the nodes whose children these are; 0 is the root.
        children: K.
        fixed: how many of them are the best candidates; the others are drawn.
        out: where they go; by default new tensors.

    Raises:
        TypeError, ValueError: tensors or sizes that do not fit each other.
    """
    batch = _check(probs, token_ids, temperatures, seeds, seq_lens, children, fixed)
    rows, width = probs.shape
    result = out or Children(
        torch.empty(rows, children, dtype=torch.int64, device=probs.device),
        torch.empty(rows, children, dtype=torch.float32, device=probs.device),
        torch.empty_like(probs),
    )
    check_tensor("out.token_ids", result.token_ids, (rows, children), torch.int64)
    check_tensor("out.scores", result.scores, (rows, children), torch.float32)
    check_tensor("out.q", result.q, (rows, width), torch.float32)
    draw_children_kernel[(rows,)](
        probs, token_ids, temperatures, seq_lens, seeds, *result, depth,
        ROWS=rows // batch, C=width, K=children, FIXED=fixed, BLOCK_C=block_of(width),
        num_warps=1, **pdl_options(probs.device),
    )  # fmt: skip
    return result


def _check(
    probs: Tensor,
    token_ids: Tensor,
    temperatures: Tensor,
    seeds: Tensor,
    seq_lens: Tensor,
    children: int,
    fixed: int,
) -> int:
    """The batch."""
    batch = seq_lens.shape[0]
    if probs.dim() != 2 or batch == 0 or probs.shape[0] % batch:
        raise ValueError(f"probs are [B * L, C] for B = {batch}, got {list(probs.shape)}")
    rows, width = probs.shape
    if not 0 <= fixed < children <= width <= MAX_LIST:
        raise ValueError(
            f"need 0 <= fixed < children <= candidates <= {MAX_LIST}, "
            f"got {fixed}, {children}, {width}"
        )
    check_tensor("probs", probs, (rows, width), torch.float32)
    check_tensor("token_ids", token_ids, (rows, width), torch.int64)
    check_tensor("temperatures", temperatures, (batch,), torch.float32)
    check_tensor("seeds", seeds, (batch,), torch.int64)
    check_tensor("seq_lens", seq_lens, (batch,), *INDEX_TYPES)
    return batch


def lists_of_tree(
    selected: Tensor, parents: Tensor, ids: Tensor, q: Tensor, *, children: int, fixed: int
) -> DraftLists:
    """The lists that a built tree's drawn nodes came from.

    Args:
        selected: ``[B, N - 1]`` candidate of each node, from ``build_tree``.
        parents: ``[B, N]`` int32, likewise.
        ids: ``[B, R, C]`` int64, the lists step after step.
        q: ``[B, R, C]`` float32.
        children: K.
        fixed: how many of the K are not drawn.

    Returns:
        For :func:`frspec_kernels.sampling.accept_sampled`.
    """
    batch, nodes = parents.shape
    drawn = torch.zeros(batch, nodes, dtype=torch.int8, device=parents.device)
    drawn[:, 1:] = selected % children >= fixed
    # Block c // K holds the children of one list, and blocks stand as lists do.
    origin = torch.where(drawn[:, 1:] != 0, selected // children, -1)
    rows = torch.full((batch, nodes), -1, dtype=torch.int32, device=parents.device)
    rows.scatter_reduce_(
        1, parents[:, 1:].long(), origin.int(), reduce="amax", include_self=True
    )  # fmt: skip
    return DraftLists(drawn, rows, ids, q, fixed)
