# pyright: reportCallIssue=false, reportArgumentType=false
"""The draft tree: growing it, building it for the target, accepting its longest path.

A round of EAGLE-2 (Li et al., arXiv:2406.16858). Each draft step proposes K tokens after each of K
beams; a candidate's score is the product of the draft's probabilities from the root on:

    score(c) = score(parent(c)) · p(token(c) | path to its parent)

The K best of the K² children of a step are the next beams (:func:`grow_tree`). After S steps the
N - 1 best of all candidates and the root make the tree (:func:`build_tree`). The target's logits at
the N nodes decide how far down the tree it agrees (:func:`accept_greedy`). Each is one launch for
the whole batch.

Letters: B requests, K top-k, S steps, C = K + (S - 1) K² candidates, N nodes, W = ⌈N / 32⌉ mask
words, D = S + 1 longest path, H width of a hidden state, V vocabulary, P parts of a row of logits.

Order: by score; between equal scores the shallower candidate, then the smaller token id, then the
better parent. A parent's score is never below its child's, so each prefix of this order contains
every candidate's ancestors. That holds for any input: a probability that is NaN or negative counts
as 0, one above 1 as 1. Token ids are below 2²⁰ and distinct among the proposals of one beam.

Numerics: float32 products in SGLang's order, so scores equal SGLang's bit by bit. The root's K
children become the first beams in the order given, as in SGLang.

CUDA-graph safe with outputs given: shapes follow from :class:`TreeShape` and B alone, without
allocation or synchronisation; padding requests may hold anything and are computed like the others.
B = 0 returns without a launch.
"""

import torch
from torch import Tensor

from .devices import check_devices
from .pdl import pdl_options
from .tree_accept import accept_greedy
from .tree_args import (
    INDEX_TYPES,
    Accepted,
    Beams,
    BuiltTree,
    Candidates,
    TreeShape,
    check_candidates,
    check_hidden,
    check_proposals,
    check_tensor,
    check_tree,
)
from .tree_buffers import (
    empty_accepted,
    empty_argmax_keys,
    empty_beams,
    empty_candidates,
    empty_tree,
)
from .tree_kernels import build_tree_kernel, grow_tree_kernel
from .tree_launch import (
    build_constexprs,
    build_warps,
    compile_specs,
    grow_constexprs,
    grow_warps,
)

__all__ = [
    "Accepted",
    "Beams",
    "BuiltTree",
    "Candidates",
    "TreeShape",
    "accept_greedy",
    "build_tree",
    "compile_specs",
    "empty_accepted",
    "empty_argmax_keys",
    "empty_beams",
    "empty_candidates",
    "empty_tree",
    "grow_tree",
]


def grow_tree(
    candidates: Candidates,
    shape: TreeShape,
    step: int,
    probs: Tensor,
    token_ids: Tensor,
    *,
    hidden: Tensor | None = None,
    out: Beams | None = None,
) -> Beams | None:
    """Record the proposals of one draft step and choose the beams of the next.

    Args:
        candidates: filled step by step: call with step 0, 1, … S - 1.
        step: from 0.
        probs: ``[B, K]`` float32 at step 0, then ``[B * K, K]``: of each beam's proposals.
        token_ids: like probs, int64.
        hidden: ``[B, H]`` at step 0, then ``[B * K, H]``: gathered for the beams, if given.
        out: where the beams go; not ``hidden``'s memory. By default new tensors.

    Returns:
        The beams; None after the last step, which chooses none.

    Raises:
        TypeError, ValueError: tensors that do not fit the shape and step.
    """
    batch = check_candidates(shape, candidates)
    check_proposals(shape, step, batch, probs, token_ids)
    device = probs.device
    check_devices(device, token_ids=token_ids, hidden=hidden, **candidates._asdict())
    last = step == shape.steps - 1
    beams = None if last else out or _beams_for(shape, batch, device, hidden)
    if beams is not None:
        rows = (batch * shape.top_k,)
        check_tensor("beams.tokens", beams.tokens, rows, torch.int64)
        check_tensor("beams.rows", beams.rows, rows, torch.int64)
        check_devices(device, **beams._asdict())
    target = None if beams is None or hidden is None else beams.hidden
    source = hidden if target is not None else None
    if hidden is not None and target is None and not last:
        raise ValueError("hidden is given but out.hidden is None: give it memory for the rows")
    if source is not None and target is not None:
        check_hidden(shape, step, batch, source, target)
    if batch == 0:
        return beams
    sizes = grow_constexprs(shape, step)
    tokens, rows_out, _ = beams or (None, None, None)
    grow_tree_kernel[(batch, 1 if source is None else shape.top_k)](
        probs, token_ids, source, *candidates, tokens, rows_out, target, step,
        0 if source is None else source.shape[1], probs.stride(0), token_ids.stride(0),
        0 if source is None else source.stride(0), 0 if target is None else target.stride(0),
        **sizes, num_warps=grow_warps(sizes["BLOCK"], source is not None),
        **pdl_options(device),
    )  # fmt: skip
    return beams


def _beams_for(shape: TreeShape, batch: int, device: torch.device, hidden: Tensor | None) -> Beams:
    if hidden is None:
        return empty_beams(shape, batch, device)
    return empty_beams(shape, batch, device, hidden_size=hidden.shape[1], dtype=hidden.dtype)


def build_tree(
    candidates: Candidates,
    shape: TreeShape,
    root_tokens: Tensor,
    seq_lens: Tensor,
    *,
    out: BuiltTree | None = None,
    draft_mask: Tensor | None = None,
    full_mask: Tensor | None = None,
    ties_by_place: bool = False,
) -> BuiltTree:
    """Choose the N - 1 best candidates and lay the tree out for verification.

    Args:
        candidates: after all S steps of :func:`grow_tree`.
        root_tokens: ``[B]`` the last accepted token of each request, int64 or int32.
        seq_lens: ``[B]`` tokens before the root, int64 or int32.
        out: where the tree goes; by default new tensors.
        draft_mask: ``[B * N * N]`` bool or uint8, filled as SGLang's ``QLEN_ONLY`` mask.
        full_mask: bool or uint8 of at least ``N (sum(seq_lens) + B N)``, whose tree columns are
            filled as in SGLang's ``FULL_MASK``. The columns of the context are left alone: set
            them to True once. Its length cannot be checked without reading ``seq_lens``.
        ties_by_place: order equal scores of a step as the candidates stand, not by token id: then
            the choice depends on no token, which drawn ones require (``docs/sampling.md``).

    Raises:
        TypeError, ValueError: tensors that do not fit the shape, or both masks.
    """
    batch = check_candidates(shape, candidates)
    check_tensor("root_tokens", root_tokens, (batch,), *INDEX_TYPES)
    check_tensor("seq_lens", seq_lens, (batch,), *INDEX_TYPES)
    device = root_tokens.device
    tree = out or empty_tree(shape, batch, device)
    check_tree(tree, shape, batch)
    kind, bytes_out = _byte_mask(shape, batch, draft_mask, full_mask)
    check_devices(device, seq_lens=seq_lens, mask=bytes_out, **candidates._asdict())
    check_devices(device, **{f"out.{name}": tensor for name, tensor in tree._asdict().items()})
    if batch == 0:
        return tree
    sizes = build_constexprs(shape)
    build_tree_kernel[(batch,)](
        *candidates, root_tokens, seq_lens, *tree, bytes_out,
        **sizes, MASK_KIND=kind, TIES_BY_PLACE=ties_by_place,
        num_warps=build_warps(sizes["BLOCK_C"]),
        **pdl_options(device),
    )  # fmt: skip
    return tree


def _byte_mask(
    shape: TreeShape, batch: int, draft_mask: Tensor | None, full_mask: Tensor | None
) -> tuple[int, Tensor | None]:
    if draft_mask is not None and full_mask is not None:
        raise ValueError("give draft_mask or full_mask, not both")
    mask = full_mask if draft_mask is None else draft_mask
    if mask is None:
        return 0, None
    least = batch * shape.nodes**2
    if mask.dtype not in (torch.bool, torch.uint8):
        raise TypeError(f"draft_mask and full_mask are bool or uint8, got {mask.dtype}")
    if mask.numel() < least or not mask.is_contiguous():
        raise ValueError(f"the mask has at least {least} contiguous bytes, got {mask.numel()}")
    return 1 if full_mask is None else 2, mask.view(torch.uint8)
