# ruff: noqa: ANN001, ANN201, ANN202, SIM108 (values inside a kernel have no Python types)
# pyright: reportCallIssue=false, reportArgumentType=false, reportOperatorIssue=false
"""Device code of :mod:`frspec_kernels.reduced_topk`: slices of the head, the merge, the final norm.

Letters: ``B`` rows, ``H`` hidden size, ``V`` reduced vocabulary, ``K`` top-k, ``P`` slices of the
vocabulary. A slice's state is ``K`` sortable keys in descending order and one packed softmax state:
``K + 1`` int64. States lie slot by slot, so that the merge reads a slot of all slices in one go.
"""

import triton
import triton.language as tl

from frspec_kernels.pdl import wait_for_previous
from frspec_kernels.primitives import (
    LOWEST_KEY,
    descending_rank,
    extract_best,
    finite_maximum,
    insert_best,
    key_score,
    key_token_id,
    pack_softmax_state,
    sortable_key,
    unpack_softmax_state,
)


@triton.jit
def _widen(w, dtype: tl.constexpr):
    """Head weights in the type of hidden, exactly.

    The conversions that compilers make of a plain cast to bf16 cannot keep up with the memory: one
    slow instruction an fp8 value, four byte permutations an int8 value. Both go through float32.
    """
    if w.dtype == tl.float8e4nv and dtype == tl.bfloat16:
        return w.to(tl.float16).to(tl.float32).to(dtype)
    if w.dtype == tl.int8 and dtype == tl.bfloat16:
        # The bits of 2**23 + 128 + w, from which 2**23 + 128 is subtracted.
        bits = w.to(tl.uint8, bitcast=True).to(tl.uint32) ^ 0x4B000080
        return (bits.to(tl.float32, bitcast=True) - 8388736.0).to(dtype)
    return w.to(dtype)


@triton.jit
def _tile_scores(
    hidden_ptr,  # [B, H]
    head_ptr,  # [·, H]
    head_rows,  # [BLOCK_V] rows of the head
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
    head = head_ptr + head_rows.to(tl.int64)[:, None] * stride_head_row + offs_h[None, :]
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
def _store_best(
    scores,  # [BLOCK_V, BLOCK_B] float32
    token_ids,  # [BLOCK_V]
    mask_v,  # [BLOCK_V]
    offs_b,  # [BLOCK_B]
    state_ptr,  # [B, K + 1, P] int64
    B,
    K: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Write the tile's K best keys, in order, and its softmax state, for every row of hidden.

    Wide tiles are finished ``COLUMNS`` rows at a time: all keys at once would not fit in registers.
    """
    BLOCK_V: tl.constexpr = scores.shape[0]
    BLOCK_B: tl.constexpr = scores.shape[1]
    if BLOCK_B > COLUMNS:
        halves = tl.permute(tl.reshape(scores, [BLOCK_V, 2, BLOCK_B // 2]), (0, 2, 1))
        low, high = tl.split(halves)
        low_b, high_b = tl.split(tl.permute(tl.reshape(offs_b, [2, BLOCK_B // 2]), (1, 0)))
        _store_best(low, token_ids, mask_v, low_b, state_ptr, B, K, COLUMNS)
        _store_best(high, token_ids, mask_v, high_b, state_ptr, B, K, COLUMNS)
    else:
        maximum = tl.max(scores, axis=0)
        total = tl.sum(tl.exp(scores - finite_maximum(maximum)[None, :]), axis=0)
        parts = tl.num_programs(1)
        state = state_ptr + offs_b.to(tl.int64) * (K + 1) * parts + tl.program_id(1)
        mask_b = offs_b < B
        tl.store(state + K * parts, pack_softmax_state(maximum, total), mask=mask_b)
        keys = sortable_key(scores, token_ids[:, None])
        keys = tl.where(mask_v[:, None], keys, LOWEST_KEY)
        for slot in range(K):
            top = tl.max(keys, axis=0)
            keys = tl.where(keys == top[None, :], LOWEST_KEY, keys)
            tl.store(state + slot * parts, top, mask=mask_b)


@triton.jit
def slice_topk_kernel(
    hidden_ptr,  # [B, H] bf16 or fp16
    head_ptr,  # [V, H], or [·, H] when row_ids picks the rows
    head_scale_ptr,  # [V] float32, or None
    row_ids_ptr,  # [V] int, or None
    token_ids_ptr,  # [V] int, or None: the draft id is the token id
    temperature_ptr,  # [B] float32, or None
    state_ptr,  # [B, K + 1, P] int64
    B,
    V,
    H,
    stride_hidden_row,
    stride_head_row,
    K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_H: tl.constexpr,
    COLUMNS: tl.constexpr,
    EVEN_H: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """Program (block of rows, slice): the state of ``BLOCK_V`` rows of the head."""
    offs_b = tl.program_id(0) * BLOCK_B + tl.arange(0, BLOCK_B)
    mask_b = offs_b < B
    offs_v = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    mask_v = offs_v < V
    wait_for_previous(USE_PDL)
    # Rows past the end repeat the last one: loads without a mask, and in bounds.
    draft_ids = tl.minimum(offs_v, V - 1)
    head_rows = draft_ids
    if row_ids_ptr is not None:
        head_rows = tl.load(row_ids_ptr + draft_ids)
    scores = _tile_scores(
        hidden_ptr, head_ptr, head_rows, offs_b, mask_b, H,
        stride_hidden_row, stride_head_row, BLOCK_V, BLOCK_B, BLOCK_H, EVEN_H,
    )  # fmt: skip
    if head_scale_ptr is not None:
        scores *= tl.load(head_scale_ptr + draft_ids)[:, None]
    if temperature_ptr is not None:
        scores /= tl.load(temperature_ptr + offs_b, mask=mask_b, other=1.0)[None, :]
    token_ids = draft_ids
    if token_ids_ptr is not None:
        token_ids = tl.load(token_ids_ptr + draft_ids)
    scores = tl.where(mask_v[:, None], scores, float("-inf"))
    _store_best(scores, token_ids, mask_v, offs_b, state_ptr, B, K, COLUMNS)


@triton.jit
def merge_topk_kernel(
    state_ptr,  # [B, K + 1, P] int64
    probs_ptr,  # [B, K] float32, or None: no outputs but merged
    token_ids_ptr,  # [B, K] int64
    lse_ptr,  # [B] float32
    merged_ptr,  # [B, K + 1] int64, or None
    parts,
    stride_state_row,
    stride_state_slot,
    stride_state_part,
    K: tl.constexpr,
    K_PAD: tl.constexpr,
    BLOCK_P: tl.constexpr,
    LOG_PROBS: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """One program a row: the P slices' states into the row's top-k, in order.

    Only the slices with the K largest heads can hold more of the top-k: after the heads, slot by
    slot, the slices whose last key is among the best so far are asked for their next.
    """
    row = tl.program_id(0).to(tl.int64)
    offs_p = tl.arange(0, BLOCK_P)
    mask_p = offs_p < parts
    wait_for_previous(USE_PDL)
    state = state_ptr + row * stride_state_row + offs_p * stride_state_part
    packed = tl.load(state + K * stride_state_slot, mask=mask_p, other=0)
    keys = tl.load(state, mask=mask_p, other=LOWEST_KEY)
    part_maximum, part_total = unpack_softmax_state(packed)
    part_maximum = tl.where(mask_p, part_maximum, float("-inf"))
    maximum = tl.max(part_maximum, axis=0)
    total = tl.sum(part_total * tl.exp(part_maximum - finite_maximum(maximum)), axis=0)
    best = extract_best(keys, K, K_PAD)
    slot = 1
    asked = keys >= tl.min(best, axis=0)
    while (slot < K) & (tl.max(tl.where(asked, 1, 0), axis=0) > 0):
        keys = tl.load(state + slot * stride_state_slot, mask=asked, other=LOWEST_KEY)
        best = insert_best(best, keys)
        asked = keys >= tl.min(best, axis=0)
        slot += 1
    slots = tl.arange(0, K_PAD)
    mask_k = slots < K
    rank = descending_rank(tl.where(mask_k, best, LOWEST_KEY))
    if probs_ptr is not None:
        log_total = tl.log(total)
        shifted = key_score(best) - maximum
        if LOG_PROBS:
            probs = shifted - log_total
        else:
            probs = tl.exp(shifted) / total
        tl.store(probs_ptr + row * K + rank, probs, mask=mask_k)
        tl.store(token_ids_ptr + row * K + rank, key_token_id(best), mask=mask_k)
        tl.store(lse_ptr + row, maximum + log_total)
    if merged_ptr is not None:
        merged = merged_ptr + row * (K + 1)
        tl.store(merged + rank, best, mask=mask_k)
        tl.store(merged + K, pack_softmax_state(maximum, total))


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
