# ruff: noqa: ANN001, ANN201, ANN202 (values inside a kernel have no Python types)
# pyright: reportCallIssue=false, reportArgumentType=false, reportOperatorIssue=false
"""Device code of :mod:`frspec_kernels.reduced_topk`: the merges of slices and of shards.

Letters: ``B`` rows, ``V`` reduced vocabulary, ``K`` top-k, ``P`` slices of the vocabulary, ``S``
shards of the head.

Only the slices with the K largest bests can hold any of the top-k: the merge picks them, and looks
at nothing else of the scores.
"""

import triton
import triton.language as tl

from frspec_kernels.pdl import wait_for_previous
from frspec_kernels.primitives import (
    LOWEST_KEY,
    descending_rank,
    extract_best,
    finite_maximum,
    key_score,
    key_token_id,
    order_score,
    pack_softmax_state,
    score_order,
    sortable_key,
    unpack_softmax_state,
)


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
def _crowded(
    scores_ptr,  # [P, BLOCK_V] float32: of one row
    places,  # [K_PAD] slices, -1 for none
    threshold,
    V,
    BLOCK_V: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """[K_PAD] whether two scores of a slice are not below ``threshold``; a NaN is not."""
    taken = places[:, None] >= 0
    first = tl.full([places.shape[0]], BLOCK_V, tl.int32)
    last = tl.full([places.shape[0]], -1, tl.int32)
    for start in range(0, BLOCK_V, BLOCK_C):
        columns = (start + tl.arange(0, BLOCK_C))[None, :]
        offs_v = places[:, None] * BLOCK_V + columns
        scores = tl.load(scores_ptr + offs_v, mask=taken, other=0.0)
        candidates = taken & (offs_v < V) & ~(scores < threshold)
        first = tl.minimum(first, tl.min(tl.where(candidates, columns, BLOCK_V), axis=1))
        last = tl.maximum(last, tl.max(tl.where(candidates, columns, -1), axis=1))
    return first < last


@triton.jit
def _insert_crowded_slices(
    best,  # [K_PAD] keys, from extract_best
    places,  # [K_PAD] their slices
    crowded,  # [K_PAD] whether a slice has several candidates
    scores_ptr,  # [P, BLOCK_V] float32: of one row
    vocab_ids_ptr,  # [V] int, or None
    V,
    BLOCK_V: tl.constexpr,
):
    """The K best keys, unordered, once the slices of several candidates have given theirs.

    A round moves one key, or turns to the next slice. The loop is short to fetch, and few slices
    are crowded.
    """
    firsts, worst = best, tl.min(best, axis=0)
    left = tl.where(crowded, places, -1)
    place = tl.max(left, axis=0)
    keys = tl.full([BLOCK_V], LOWEST_KEY, tl.int64)
    top = tl.max(keys, axis=0)
    while (top > worst) | (place >= 0):
        if top > worst:
            best = tl.where(best == worst, top, best)
            keys = tl.where(keys == top, LOWEST_KEY, keys)
            worst = tl.min(best, axis=0)
        else:
            first = tl.max(tl.where(places == place, firsts, LOWEST_KEY), axis=0)
            keys = _slice_keys(scores_ptr, vocab_ids_ptr, place, V, BLOCK_V)
            keys = tl.where(keys == first, LOWEST_KEY, keys)
            left = tl.where(left == place, -1, left)
            place = tl.max(left, axis=0)
        top = tl.max(keys, axis=0)
    return best


@triton.jit
def _slice_keys(scores_ptr, vocab_ids_ptr, place, V, BLOCK_V: tl.constexpr):
    """[BLOCK_V] keys of the slice ``place`` of a row."""
    offs_v = place * BLOCK_V + tl.arange(0, BLOCK_V)
    mask_v = offs_v < V
    scores = tl.load(scores_ptr + offs_v)
    ids = offs_v
    if vocab_ids_ptr is not None:
        ids = tl.load(vocab_ids_ptr + offs_v, mask=mask_v, other=0).to(tl.int32)
    return tl.where(mask_v, sortable_key(score_order(scores), ids), LOWEST_KEY)


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
    BLOCK_C: tl.constexpr,  # scores of a slice that are looked at together
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
        tiles = scores_ptr + row * parts * BLOCK_V
        crowded = _crowded(tiles, places, order_score(worst), V, BLOCK_V, BLOCK_C)
        if tl.max(crowded.to(tl.int32), axis=0) > 0:
            best = _insert_crowded_slices(best, places, crowded, tiles, vocab_ids_ptr, V, BLOCK_V)
            rank = descending_rank(tl.where(rank < K, best, LOWEST_KEY))
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
