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
