# pyright: reportCallIssue=false, reportArgumentType=false
"""Greedy verification of a draft tree; see :mod:`frspec_kernels.tree` for the terms."""

from typing import Any

import torch
from torch import Tensor

from .devices import check_devices
from .pdl import pdl_options
from .tree_accept_kernels import accept_greedy_kernel, argmax_kernel
from .tree_args import INDEX_TYPES, MAX_TOKEN_ID, Accepted, check_accepted, check_path, check_tensor
from .tree_buffers import empty_accepted, empty_argmax_keys
from .tree_launch import ARGMAX_BLOCK, ARGMAX_WARPS, accept_constexprs, accept_warps, argmax_slices

LOGIT_TYPES = (torch.float32, torch.bfloat16, torch.float16)


def accept_greedy(
    tokens: Tensor,
    parents: Tensor,
    target: Tensor,
    seq_lens: Tensor,
    max_path: int,
    *,
    slots: Tensor | None = None,
    argmax_keys: Tensor | None = None,
    out: Accepted | None = None,
) -> Accepted:
    """The longest path from the root on which every draft is the target's own next token.

    Children of one node have distinct tokens, so there is one such path.

    Args:
        tokens: ``[B, N]`` int64, from :func:`build_tree`.
        parents: ``[B, N]`` int32; a parent comes before its children.
        target: the target's next token at each node, ``[B, N]`` int64, or its logits
            ``[B * N, V]`` (float32, bf16 or fp16), whose argmax is taken in a launch of its own:
            the smaller id of equal logits, NaN above all.
        seq_lens: ``[B]`` tokens before the root, int64 or int32.
        max_path: D, the most nodes of a path: the deepest node's depth plus 1. With less, a longer
            path ends after its first D nodes, as if deeper ones were not in the tree.
        slots: ``[B * N]`` cache slots of the nodes, int64 or int32; gives the moves that bring the
            accepted path to the front. Read all sources before writing a target.
        argmax_keys: memory for the argmax, from :func:`empty_argmax_keys`.
        out: where the outcome goes; by default new tensors.

    Raises:
        TypeError, ValueError: tensors that do not fit each other.
    """
    check_path(tokens, max_path)
    batch, nodes = tokens.shape
    check_tensor("tokens", tokens, (batch, nodes), torch.int64)
    check_tensor("parents", parents, (batch, nodes), torch.int32)
    check_tensor("seq_lens", seq_lens, (batch,), *INDEX_TYPES)
    if slots is not None:
        check_tensor("slots", slots, (batch * nodes,), *INDEX_TYPES)
    result = out or empty_accepted(batch, nodes, max_path, tokens.device, slots=slots is not None)
    check_accepted(result, batch, nodes, max_path, slots is not None)
    inputs = {"parents": parents, "target": target, "seq_lens": seq_lens, "slots": slots}
    check_devices(tokens.device, argmax_keys=argmax_keys, **inputs, **result._asdict())
    if target.is_floating_point():
        parts, keys = _argmax(target, batch * nodes, argmax_keys)
    else:
        check_tensor("target", target, (batch, nodes), torch.int64)
        parts, keys = 0, target
    if batch == 0:
        return result
    sizes = accept_constexprs(nodes, max_path, parts)
    accept_greedy_kernel[(batch,)](
        tokens, parents, keys, seq_lens, slots, *result[:6],
        *(result[6:] if slots is not None else (None, None)),
        **sizes, num_warps=accept_warps(sizes["BLOCK_N"]), **pdl_options(tokens.device),
    )  # fmt: skip
    return result


def _argmax(logits: Tensor, rows: int, keys: Tensor | None) -> tuple[int, Tensor]:
    """Parts per row and the keys [rows, parts] of the logits' argmax."""
    if logits.dtype not in LOGIT_TYPES:
        raise TypeError(f"logits are float32, bf16 or fp16, got {logits.dtype}; convert them")
    if logits.dim() != 2 or logits.shape[0] != rows or logits.stride(1) != 1:
        raise ValueError(
            f"logits are [{rows}, V] with contiguous rows, got {list(logits.shape)} "
            f"with strides {list(logits.stride())}"
        )
    vocab = logits.shape[1]
    if not 1 <= vocab <= MAX_TOKEN_ID:
        raise ValueError(f"logits are of 1 to {MAX_TOKEN_ID} tokens, got {vocab}")
    slices = argmax_slices(vocab)
    if keys is None:
        keys = empty_argmax_keys(rows, vocab, logits.device)
    check_tensor("argmax_keys", keys, (rows, slices.parts), torch.int64)
    if rows:
        options: dict[str, Any] = pdl_options(logits.device)
        argmax_kernel[(rows, slices.parts)](
            logits, keys, vocab, logits.stride(0), P=slices.parts, SLICE=slices.size,
            BLOCK=ARGMAX_BLOCK, num_warps=ARGMAX_WARPS, **options,
        )  # fmt: skip
    return slices.parts, keys
