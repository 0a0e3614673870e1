# ruff: noqa: ANN001, ANN201, ANN202 (values inside a kernel have no Python types)
# pyright: reportCallIssue=false, reportArgumentType=false, reportOperatorIssue=false
"""Device code of :mod:`frspec_kernels.reduced_topk`: slices of the head, merges, the final norm.

Letters: ``B`` rows, ``H`` hidden size, ``V`` reduced vocabulary, ``K`` top-k, ``P`` slices of the
vocabulary, ``S`` shards of the head.

A slice leaves its scores, the sortable key of its best score, and its packed softmax state. Only
the slices with the K largest bests can hold any of the top-k: the merge picks them, and looks at
nothing else of the scores.
"""

import triton
import triton.language as tl

from frspec_kernels.pdl import wait_for_previous
from frspec_kernels.primitives import (
    LOWEST_KEY,
    LOWEST_ORDER,
    MAX_TOKEN_ID,
    descending_rank,
    extract_best,
    finite_maximum,
    insert_best,
    key_score,
    key_token_id,
    order_score,
    pack_softmax_state,
    score_order,
    sortable_key,
    unpack_softmax_state,
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
def slice_topk_kernel(
    hidden_ptr,  # [B, H] bf16 or fp16
    head_ptr,  # [V, H], or [·, H] when row_ids picks the rows
    head_scale_ptr,  # [V] float32, or None
    row_ids_ptr,  # [V] int, or None
    token_ids_ptr,  # [V] int, or None: the draft id is the token id
    temperature_ptr,  # [B] float32, or None
    scores_ptr,  # [B, P, BLOCK_V] float32, or None: only the best of a slice is wanted
    bests_ptr,  # [B, 2, P] int64: keys of the slices' bests; their softmax states
    B,
    V,
    H,
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
def _store_row(
    best,  # [K_PAD] keys
    rank,  # [K_PAD] their places in the outputs
    row,
    maximum,
    total,
    probs_ptr,  # [B, K] float32, or None: nothing but merged
    token_ids_ptr,  # [B, K] int64
    lse_ptr,  # [B] float32
    merged_ptr,  # [B, K + 1] int64, or None
    K: tl.constexpr,
    LOG_PROBS: tl.constexpr,
):
    mask_k = tl.arange(0, best.shape[0]) < K
    if probs_ptr is not None:
        log_total = tl.log(total)
        shifted = key_score(best) - maximum
        if LOG_PROBS:
            probs = shifted - log_total
        else:
            probs = tl.div_rn(tl.exp(shifted), tl.broadcast_to(total, shifted.shape))
        tl.store(probs_ptr + row * K + rank, probs, mask=mask_k)
        tl.store(token_ids_ptr + row * K + rank, key_token_id(best), mask=mask_k)
        tl.store(lse_ptr + row, maximum + log_total)
    if merged_ptr is not None:
        merged = merged_ptr + row * (K + 1)
        tl.store(merged + rank, best, mask=mask_k)
        tl.store(merged + K, pack_softmax_state(maximum, total))


@triton.jit
def _merge_softmax_states(packed, mask):
    """Maximum and sum of all the ``packed`` states [N]."""
    maxima, totals = unpack_softmax_state(packed)
    maxima = tl.where(mask, maxima, float("-inf"))
    maximum = tl.max(maxima, axis=0)
    scale = tl.exp(maxima - finite_maximum(maximum))
    return maximum, tl.sum(tl.where(mask, totals * scale, 0.0), axis=0)


@triton.jit
def _insert_candidates(best, scores, offs_v, mask_v, vocab_ids_ptr, K: tl.constexpr):
    """Move the scores that beat some of ``best`` [K_PAD] into it; the new best and their ranks.

    ``scores``, ``offs_v``, ``mask_v``: [K_PAD, BLOCK_V], row j the slice of ``best[j]``.
    """
    ids = offs_v
    if vocab_ids_ptr is not None:
        ids = tl.load(vocab_ids_ptr + offs_v, mask=mask_v, other=0).to(tl.int32)
    keys = tl.where(mask_v, sortable_key(score_order(scores), ids), LOWEST_KEY)
    keys = tl.where(keys == best[:, None], LOWEST_KEY, keys)
    best = insert_best(best, tl.ravel(keys))
    slots = tl.arange(0, best.shape[0])
    return best, descending_rank(tl.where(slots < K, best, LOWEST_KEY))


@triton.jit
def merge_slices_kernel(
    scores_ptr,  # [B, P, BLOCK_V] float32, or None if K is 1
    bests_ptr,  # [B, 2, P] int64
    vocab_ids_ptr,  # [V] int, or None: the draft id is the token id
    probs_ptr,  # [B, K] float32, or None: nothing but merged
    token_ids_ptr,  # [B, K] int64
    lse_ptr,  # [B] float32
    merged_ptr,  # [B, K + 1] int64, or None
    V,
    parts,
    rounds,  # K, at run time: the rounds are not unrolled, which would take longer to fetch
    K: tl.constexpr,
    K_PAD: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_V: tl.constexpr,
    LOG_PROBS: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """One program a row: the K slices with the largest bests, then the K best of their scores.

    Mostly those are the bests: few slices hold two of the top-k.
    """
    row = tl.program_id(0).to(tl.int64)
    offs_p = tl.arange(0, BLOCK_P)
    mask_p = offs_p < parts
    wait_for_previous(USE_PDL)
    bests = bests_ptr + 2 * row * parts + offs_p
    keys = tl.load(bests, mask=mask_p, other=LOWEST_KEY)
    packed = tl.load(bests + parts, mask=mask_p, other=0)
    maximum, total = _merge_softmax_states(packed, mask_p)
    best, places, worst = extract_best(keys, rounds, K, K_PAD)
    rank = tl.arange(0, K_PAD)
    if scores_ptr is not None:
        taken = places[:, None] >= 0
        offs_v = places[:, None] * BLOCK_V + tl.arange(0, BLOCK_V)[None, :]
        tiles = scores_ptr + row * parts * BLOCK_V + offs_v
        scores = tl.load(tiles, mask=taken, other=0.0)
        mask_v = taken & (offs_v < V) & ~(scores < order_score(worst))  # NaN counts
        candidates = tl.sum(mask_v.to(tl.int32))
        if candidates > tl.minimum(parts, K):  # each slice's best is one of them
            best, rank = _insert_candidates(best, scores, offs_v, mask_v, vocab_ids_ptr, K)
    _store_row(
        best, rank, row, maximum, total,
        probs_ptr, token_ids_ptr, lse_ptr, merged_ptr, K, LOG_PROBS,
    )  # fmt: skip


@triton.jit
def merge_shards_kernel(
    states_ptr,  # [S, B, K + 1] int64
    probs_ptr,  # [B, K] float32
    token_ids_ptr,  # [B, K] int64
    lse_ptr,  # [B] float32
    shards,
    rounds,  # K, as in the merge of slices
    K: tl.constexpr,
    K_PAD: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_N: tl.constexpr,
    LOG_PROBS: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """One program a row: the K best of the shards' S · K keys."""
    row = tl.program_id(0).to(tl.int64)
    stride = tl.num_programs(0).to(tl.int64) * (K + 1)
    states = states_ptr + row * (K + 1)
    offs_n, offs_s = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_S)
    wait_for_previous(USE_PDL)
    keys = states + (offs_n // K) * stride + offs_n % K
    keys = tl.load(keys, mask=offs_n < shards * K, other=LOWEST_KEY)
    best, _, _ = extract_best(keys, rounds, K, K_PAD)
    mask_s = offs_s < shards
    packed = tl.load(states + offs_s * stride + K, mask=mask_s, other=0)
    maximum, total = _merge_softmax_states(packed, mask_s)
    _store_row(
        best, tl.arange(0, K_PAD), row, maximum, total,
        probs_ptr, token_ids_ptr, lse_ptr, None, K, LOG_PROBS,
    )  # fmt: skip


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
