# pyright: reportCallIssue=false, reportArgumentType=false
"""Verifying a draft tree at temperature > 0, so that the output is distributed as the target's.

The rule is derived in ``docs/sampling.md``. At a node with target distribution p, children are
tried in order, from p₁ = p on:

    accept xᵢ with probability min(1, pᵢ(xᵢ) / qᵢ(xᵢ)), else pᵢ₊₁ = (pᵢ - qᵢ)₊ / ‖(pᵢ - qᵢ)₊‖₁

qᵢ is a point mass for a fixed child; for a drawn one it is the draft's list without the fixed
candidates and the children drawn before. When no child is left, the token is drawn from what
remains of p. p is softmax(logits / temperature), cut by top-k, top-p and min-p, renormalised.

Letters: B requests, N nodes, D longest path, V vocabulary, P parts of a row, R lists of a request,
C candidates of a list.

p is never written out, and no vocabulary is sorted. Per row, launch by launch:
1. maximum and sum of each of the P parts, and the maxima of groups of tokens;
2. LEVELS times: of each part, the mass from each of EDGES scores on, which narrows down where the
   smallest kept score lies; a small top-k is bounded by the k-th best group instead;
3. the keys of the last bracket, few unless scores are equal, into a list, and the mass above;
4. the pivot key, by comparing all pairs of that list, or first bisecting it where it is long, and
   the children's fate;
then, once for a request, the exponential race over the row where the path ends, and the outcome.
Steps 2 and 3 are left out where no request truncates. Few rows go through 1 to 4 all at once; many
go level by level of the tree, only those that acceptance visits. Both give the same bits.

Numerics: float32; the mass of candidates is summed in integers, so that no order matters. Random
numbers are functions of (seed, root position, depth, token id): the outcome for a request does not
depend on the batch around it. Rows without a finite maximum have the outcomes of the document.

CUDA-graph safe with the workspace and outputs given. B = 0 returns without a launch.
"""

from typing import Any

import torch
from torch import Tensor

from . import sampling_launch
from .pdl import pdl_options
from .sampling_accept_kernels import decide_children_kernel, finish_sampled_kernel, race_kernel
from .sampling_args import (
    DraftLists,
    Sampling,
    SamplingWorkspace,
    check_lists,
    check_rows,
    check_thresholds,
    check_workspace,
    workspace_for,
)
from .sampling_bracket_kernels import collect_candidates_kernel, narrow_bracket_kernel
from .sampling_filter_kernels import softmax_parts_kernel
from .sampling_launch import (
    DECIDE_WARPS,
    NARROW_WARPS,
    SLICE_WARPS,
    Sizes,
    collect_constexprs,
    compile_specs,
    decide_constexprs,
    finish_constexprs,
    narrow_constexprs,
    parts_constexprs,
    race_constexprs,
    sizes_of,
)
from .tree_args import INDEX_TYPES, Accepted, check_accepted, check_tensor
from .tree_buffers import empty_accepted

__all__ = [
    "DraftLists",
    "Sampling",
    "SamplingWorkspace",
    "accept_sampled",
    "allocate_sampling_workspace",
    "compile_specs",
]


def allocate_sampling_workspace(
    batch: int,
    nodes: int,
    vocab_size: int,
    max_path: int,
    device: torch.device | str,
    *,
    list_size: int = 0,
    truncates: bool = True,
) -> SamplingWorkspace:
    """Memory for :func:`accept_sampled`; with truncation mostly 8 bytes a logit worked on at once.

    Args:
        batch: B, exactly.
        nodes: N.
        vocab_size: V.
        max_path: D.
        device: where it lies.
        list_size: C; 0 without drawn children.
        truncates: as in :class:`Sampling`.
    """
    sizes = sizes_of(batch, nodes, max_path, vocab_size, list_size)
    return workspace_for(sizes, batch, truncates, device)


def accept_sampled(
    logits: Tensor,
    tokens: Tensor,
    parents: Tensor,
    seq_lens: Tensor,
    max_path: int,
    sampling: Sampling,
    *,
    lists: DraftLists | None = None,
    threshold_single: float = 1.0,
    threshold_acc: float = 1.0,
    slots: Tensor | None = None,
    workspace: SamplingWorkspace | None = None,
    out: Accepted | None = None,
) -> Accepted:
    """The accepted path of each request and a token drawn where it ends.

    Args:
        logits: the target's, ``[B * N, V]`` float32, bf16 or fp16, with penalties, biases and
            grammars applied. Not changed.
        tokens: ``[B, N]`` int64. Node 0 is the root.
        parents: ``[B, N]`` int32; a parent comes before its children, a node's fixed children
            before its drawn ones, drawn ones in the order of the draw; tokens of one parent's
            children are distinct.
        seq_lens: ``[B]`` tokens before the root, int64 or int32: the random numbers' position.
        max_path: D, the deepest node's depth plus 1.
        sampling: the requests' parameters.
        lists: what drawn children came from; without it every child is fixed.
        threshold_single: a fixed child of at least this probability is accepted. Below 1 the
            output is no longer the target's.
        threshold_acc: fixed children are accepted with probability min(1, p / threshold_acc)
            together. Below 1 the output is no longer the target's.
        slots: ``[B * N]`` cache slots of the nodes; gives moves as :func:`accept_greedy` does.
        workspace: from :func:`allocate_sampling_workspace` with the same sizes.
        out: where the outcome goes; by default new tensors.

    Returns:
        As :func:`frspec_kernels.tree.accept_greedy`; ``bonus_tokens`` are the drawn ones.

    Raises:
        TypeError, ValueError: tensors that do not fit each other, thresholds out of range.
    """
    check_rows(logits, tokens, parents, seq_lens, sampling)
    check_thresholds(threshold_single, threshold_acc, lists)
    batch, nodes = tokens.shape
    if max_path < 1:
        raise ValueError(f"max_path is at least 1, got {max_path}")
    if lists is not None:
        check_lists(lists, batch, nodes)
    if slots is not None:
        check_tensor("slots", slots, (batch * nodes,), *INDEX_TYPES)
    result = out or empty_accepted(batch, nodes, max_path, tokens.device, slots=slots is not None)
    check_accepted(result, batch, nodes, max_path, slots is not None)
    listed = 0 if lists is None else lists.ids.shape[2]
    sizes = sizes_of(batch, nodes, max_path, logits.shape[1], listed)
    memory = workspace or workspace_for(sizes, batch, sampling.truncates, tokens.device)
    check_workspace(memory, sizes, batch, sampling.truncates)
    if batch == 0:
        return result
    tree = (tokens, parents, seq_lens)
    thresholds = (threshold_single, threshold_acc)
    if sizes.by_row:
        _decide(sizes, memory, None, logits, tree, sampling, lists, thresholds)
    else:
        memory.current.zero_()
        for _ in range(max_path):
            _decide(sizes, memory, memory.current, logits, tree, sampling, lists, thresholds)
    options = pdl_options(tokens.device)
    race_kernel[(batch, sizes.parts)](
        logits, seq_lens, sampling.seeds, memory.best_keys, memory.next, memory.pivots,
        memory.slopes, memory.left_ids, memory.left_weights, memory.race_keys, sizes.vocab,
        logits.stride(0), **race_constexprs(sizes), num_warps=SLICE_WARPS, **options,
    )  # fmt: skip
    finish_sampled_kernel[(batch,)](
        tokens, seq_lens, slots, memory.best_keys, memory.next, memory.race_keys, *result[:6],
        *(result[6:] if slots is not None else (None, None)),
        **finish_constexprs(sizes), num_warps=1, **options,
    )  # fmt: skip
    return result


def _decide(
    sizes: Sizes,
    memory: SamplingWorkspace,
    current: Tensor | None,
    logits: Tensor,
    tree: tuple[Tensor, Tensor, Tensor],
    sampling: Sampling,
    lists: DraftLists | None,
    thresholds: tuple[float, float],
) -> None:
    """Softmax, truncation and the children's fate, for every row or for the current ones."""
    options: dict[str, Any] = pdl_options(logits.device)
    vocab, stride = sizes.vocab, logits.stride(0)
    cut, slots = sampling.truncates, sizes.slots
    softmax_parts_kernel[(slots, sizes.parts)](
        logits, current, sampling.temperatures, memory.best_keys, memory.sums, memory.group_orders,
        vocab, stride, **parts_constexprs(sizes, cut), num_warps=SLICE_WARPS, **options,
    )  # fmt: skip
    parameters = sampling[:4]
    if cut:
        brackets = (memory.brackets, memory.edges, memory.edge_masses)
        for level in range(sampling_launch.LEVELS):
            narrow_bracket_kernel[(slots, sizes.parts)](
                logits, current, *parameters, memory.best_keys, memory.sums, memory.group_orders,
                *brackets, memory.counts, vocab, stride, **narrow_constexprs(sizes, level),
                num_warps=NARROW_WARPS, **options,
            )  # fmt: skip
        collect_candidates_kernel[(slots, sizes.parts)](
            logits, current, *parameters, memory.best_keys, memory.sums, memory.group_orders,
            *brackets, memory.masses_above, memory.counts, memory.candidates, vocab, stride,
            **collect_constexprs(sizes), num_warps=SLICE_WARPS, **options,
        )  # fmt: skip
    drawn, rows, ids, q = lists[:4] if lists is not None else (None, None, None, None)
    decide_children_kernel[(slots,)](
        logits, current, *tree, sampling.seeds, *parameters, drawn, rows, ids, q,
        memory.best_keys, memory.sums, memory.brackets, memory.masses_above, memory.counts,
        memory.candidates, memory.next, memory.pivots, memory.slopes, memory.left_ids,
        memory.left_weights, vocab, stride, *thresholds, 0 if ids is None else ids.shape[1],
        **decide_constexprs(sizes, 0 if lists is None else lists.fixed, cut),
        num_warps=DECIDE_WARPS, **options,
    )  # fmt: skip
