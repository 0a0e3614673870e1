# ruff: noqa: ANN001, ANN201, ANN202 (values inside a kernel have no Python types)
# pyright: reportCallIssue=false, reportArgumentType=false, reportOperatorIssue=false
"""Device code of :mod:`frspec_kernels.reduced_topk`: slices of the head, and the final norm.

Letters: ``B`` rows, ``H`` hidden size, ``V`` reduced vocabulary, ``P`` slices of the vocabulary.

A slice leaves its scores, the sortable key of its best score, and its packed softmax state.
"""

import triton
import triton.language as tl

from frspec_kernels.pdl import wait_for_previous
from frspec_kernels.primitives import (
    LOWEST_ORDER,
    MAX_TOKEN_ID,
    finite_maximum,
    order_score,
    pack_softmax_state,
    score_order,
    sortable_key,
)


@triton.jit
def _widen(w, dtype: tl.constexpr):
    """Head weights in the type of hidden, exactly.

    Two plain casts cannot keep up with the memory, one slow instruction a value: they go through
    float32.
    """
    if w.dtype == tl.float8e4nv and dtype == tl.bfloat16:
        return w.to(tl.float16).to(tl.float32).to(dtype)
    if w.dtype == tl.int8 and dtype == tl.float16:
        # The bits of 2**23 + 128 + w, from which 2**23 + 128 is subtracted.
        bits = w.to(tl.uint8, bitcast=True).to(tl.uint32) ^ 0x4B000080
        return (bits.to(tl.float32, bitcast=True) - 8388736.0).to(dtype)
    return w.to(dtype)


@triton.jit
def _tile_scores(
    hidden_ptr,  # [B, H]
    head_ptr,  # [·, H]
    row_ids,  # [BLOCK_V] rows of the head
    offs_b,
    mask_b,
    H,
    stride_hidden_row,
    stride_head_row,
    BLOCK_V: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_H: tl.constexpr,
    EVEN_H: tl.constexpr,
):
    """[BLOCK_V, BLOCK_B] float32 products. The head is the left operand: it has the many rows."""
    offs_h = tl.arange(0, BLOCK_H)
    head = head_ptr + row_ids.to(tl.int64)[:, None] * stride_head_row + offs_h[None, :]
    hidden = hidden_ptr + offs_b.to(tl.int64)[None, :] * stride_hidden_row + offs_h[:, None]
    scores = tl.zeros([BLOCK_V, BLOCK_B], tl.float32)
    for start in range(0, H, BLOCK_H):
        if EVEN_H:
            w = tl.load(head)
            x = tl.load(hidden, mask=mask_b[None, :], other=0.0)
        else:
            mask_h = start + offs_h < H
            w = tl.load(head, mask=mask_h[None, :], other=0.0)
            x = tl.load(hidden, mask=mask_h[:, None] & mask_b[None, :], other=0.0)
        scores = tl.dot(_widen(w, x.dtype), x, scores)
        head += BLOCK_H
        hidden += BLOCK_H
    return scores


@triton.jit
def slice_topk_kernel(
    hidden_ptr,  # [B, H] bf16 or fp16
    head_ptr,  # [V, H], or [head_rows, H] when row_ids picks the rows
    head_scale_ptr,  # [V] float32, or None
    row_ids_ptr,  # [V] int, or None
    token_ids_ptr,  # [V] int, or None: the draft id is the token id
    temperature_ptr,  # [B] float32, or None
    scores_ptr,  # [B, P, BLOCK_V] float32, or None: only the best of a slice is wanted
    bests_ptr,  # [B, 2, P] int64: keys of the slices' bests; their softmax states
    B,
    V,
    H,
    head_rows,
    stride_hidden_row,
    stride_head_row,
    BLOCK_V: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_H: tl.constexpr,
    EVEN_H: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """Program (block of rows, slice): the scores of ``BLOCK_V`` rows of the head."""
    offs_b = tl.program_id(0) * BLOCK_B + tl.arange(0, BLOCK_B)
    mask_b = offs_b < B
    offs_v = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    mask_v = offs_v < V
    wait_for_previous(USE_PDL)
    # Rows past the end repeat the last one: loads without a mask, and in bounds.
    draft_ids = tl.minimum(offs_v, V - 1)
    row_ids = draft_ids
    if row_ids_ptr is not None:
        row_ids = tl.load(row_ids_ptr + draft_ids)
        row_ids = tl.where((row_ids >= 0) & (row_ids < head_rows), row_ids, 0)
    scores = _tile_scores(
        hidden_ptr, head_ptr, row_ids, offs_b, mask_b, H,
        stride_hidden_row, stride_head_row, BLOCK_V, BLOCK_B, BLOCK_H, EVEN_H,
    )  # fmt: skip
    if row_ids_ptr is not None:  # read again: nothing more to keep through the products
        row_ids = tl.load(row_ids_ptr + draft_ids)
        known = (row_ids >= 0) & (row_ids < head_rows)
        scores = tl.where(known[:, None], scores, float("nan"))
    if head_scale_ptr is not None:
        scores *= tl.load(head_scale_ptr + draft_ids)[:, None]
    if temperature_ptr is not None:
        scores /= tl.load(temperature_ptr + offs_b, mask=mask_b, other=1.0)[None, :]
    token_ids = draft_ids
    if token_ids_ptr is not None:
        token_ids = tl.load(token_ids_ptr + draft_ids)
    order = tl.where(mask_v[:, None], score_order(scores), LOWEST_ORDER)
    best = tl.max(order, axis=0)
    tied = tl.where(order == best[None, :], token_ids.to(tl.int32)[:, None], MAX_TOKEN_ID)
    maximum = order_score(best)
    exps = tl.exp(scores - finite_maximum(maximum)[None, :])
    total = tl.sum(tl.where(mask_v[:, None], exps, 0.0), axis=0)
    parts = tl.num_programs(1)
    row = offs_b.to(tl.int64) * parts
    bests = bests_ptr + 2 * row + tl.program_id(1)
    tl.store(bests, sortable_key(best, tl.min(tied, axis=0)), mask=mask_b)
    tl.store(bests + parts, pack_softmax_state(maximum, total), mask=mask_b)
    if scores_ptr is not None:
        tile = (row + tl.program_id(1))[None, :] * BLOCK_V + tl.arange(0, BLOCK_V)[:, None]
        tl.store(scores_ptr + tile, scores, mask=mask_b[None, :])


@triton.jit
def final_norm_kernel(
    hidden_ptr,  # [B, H]
    residual_ptr,  # [B, H], or None; becomes hidden + residual
    weight_ptr,  # [H]
    normed_ptr,  # [B, H]
    H,
    eps,
    stride_hidden_row,
    stride_residual_row,
    BLOCK_H: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """One program a row: RMSNorm in float32, rounded once to the type of hidden."""
    row = tl.program_id(0).to(tl.int64)
    offs_h = tl.arange(0, BLOCK_H)
    mask_h = offs_h < H
    wait_for_previous(USE_PDL)
    x = tl.load(hidden_ptr + row * stride_hidden_row + offs_h, mask=mask_h, other=0.0)
    x = x.to(tl.float32)
    weight = tl.load(weight_ptr + offs_h, mask=mask_h, other=0.0).to(tl.float32)
    if residual_ptr is not None:
        residual = residual_ptr + row * stride_residual_row + offs_h
        x += tl.load(residual, mask=mask_h, other=0.0).to(tl.float32)
        tl.store(residual, x.to(residual_ptr.dtype.element_ty), mask=mask_h)
    scale = tl.rsqrt(tl.sum(x * x, axis=0) / H + eps)
    normed = x * scale * weight
    tl.store(normed_ptr + row * H + offs_h, normed.to(normed_ptr.dtype.element_ty), mask=mask_h)
