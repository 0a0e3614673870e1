# ruff: noqa: ANN001, ANN201 (values inside a kernel have no Python types)
# pyright: reportOperatorIssue=false, reportArgumentType=false, reportCallIssue=false
"""Kernels that grow and build the draft tree; see :mod:`frspec_kernels.tree` for the terms."""

import triton
import triton.language as tl

from .pdl import wait_for_previous
from .primitives import LOWEST_KEY

# A candidate key is one int64: 30 bits of score, 4 of step, 20 of token id, 10 of place. What must
# sort ascending is stored inverted.
SCORE_SHIFT = tl.constexpr(34)
STEP_SHIFT = tl.constexpr(30)
TOKEN_SHIFT = tl.constexpr(10)
STEP_MASK = tl.constexpr(2**4 - 1)
TOKEN_MASK = tl.constexpr(2**20 - 1)
PLACE_MASK = tl.constexpr(2**10 - 1)
HALF_OF_SCORES = tl.constexpr(2**29)  # subtracted, so that the highest bit can be the sign
FULL_MASK = tl.constexpr(2)  # a value of MASK_KIND


@triton.jit
def candidate_key(scores, steps, tokens, places):
    """Sorts by score, then shallower, then smaller token id, then smaller place in its step.

    ``scores`` in [0, 1], whose float bits fit 30 bits. The steps stand above the token ids so that
    a parent, never worse than its child, always precedes it.
    """
    bits = scores.to(tl.int32, bitcast=True).to(tl.int64)
    step = (~steps.to(tl.int64) & STEP_MASK) << STEP_SHIFT
    token = (~tokens.to(tl.int64) & TOKEN_MASK) << TOKEN_SHIFT
    place = ~places.to(tl.int64) & PLACE_MASK
    return ((bits - HALF_OF_SCORES) << SCORE_SHIFT) | step | token | place


@triton.jit
def key_place(keys):
    """The int32 places of ``keys``."""
    return (~keys & PLACE_MASK).to(tl.int32)


@triton.jit
def key_token(keys):
    """The int64 token ids of ``keys``."""
    return ~(keys >> TOKEN_SHIFT) & TOKEN_MASK


@triton.jit(do_not_specialize=["step"])  # else the second step compiles a kernel of its own
def grow_tree_kernel(
    probs_ptr,  # [B * K, K] float32; [B, K] when FIRST
    tokens_ptr,  # like probs, int64
    hidden_ptr,  # [B * K, H]; [B, H] when FIRST; or None
    scores_ptr,  # [B, C] float32
    candidate_tokens_ptr,  # [B, C] int64
    parents_ptr,  # [B, PARENTS] int64
    beam_tokens_ptr,  # [B * K] int64
    beam_rows_ptr,  # [B * K] int64
    beam_hidden_ptr,  # [B * K, H] or None
    step,
    H,
    stride_probs,
    stride_tokens,
    stride_hidden,
    stride_beam_hidden,
    K: tl.constexpr,
    C: tl.constexpr,
    PARENTS: tl.constexpr,
    FIRST: tl.constexpr,
    LAST: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_H: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """One step of one request; with hidden states, program (b, i) also copies beam i's row."""
    request, copied = tl.program_id(0).to(tl.int64), tl.program_id(1)
    place = tl.arange(0, BLOCK)
    wait_for_previous(USE_PDL)
    if FIRST:
        real = place < K
        row, first = request + place * 0, 0
        parent_score = 1.0
    else:
        real = place < K * K
        row, first = request * K + place // K, K + (step - 1) * K * K
        beam_at = parents_ptr + request * PARENTS + 1 + (step - 1) * K + place // K
        beam = tl.load(beam_at, mask=real, other=0)
        parent_score = tl.load(scores_ptr + request * C + beam, mask=real, other=0.0)
    branch = place % K
    prob = tl.load(probs_ptr + row * stride_probs + branch, mask=real, other=0.0)
    token = tl.load(tokens_ptr + row * stride_tokens + branch, mask=real, other=0)
    score = parent_score * tl.where(prob > 0.0, tl.minimum(prob, 1.0), 0.0)  # NaN > 0 is false
    if copied == 0:
        at = request * C + first + place
        tl.store(scores_ptr + at, score, mask=real)
        tl.store(candidate_tokens_ptr + at, token, mask=real)
    if FIRST and copied == 0:
        tl.store(parents_ptr + request * PARENTS, -1)
    if not LAST:
        if not FIRST:
            keys = tl.where(real, candidate_key(score, step, token, place), LOWEST_KEY)
            keys = tl.sort(keys, descending=True)
            place, token, row = key_place(keys), key_token(keys), request * K + key_place(keys) // K
        rank = tl.arange(0, BLOCK)
        kept = rank < K
        if copied == 0:
            beams_at = parents_ptr + request * PARENTS + 1 + step * K
            tl.store(beams_at + rank, (first + place).to(tl.int64), mask=kept)
            tl.store(beam_tokens_ptr + request * K + rank, token, mask=kept)
            tl.store(beam_rows_ptr + request * K + rank, row, mask=kept)
        if hidden_ptr is not None:
            source = tl.sum(tl.where(rank == copied, row, 0), axis=0)
            source_at = hidden_ptr + source * stride_hidden
            target_at = beam_hidden_ptr + (request * K + copied) * stride_beam_hidden
            for start in range(0, H, BLOCK_H):
                column = start + tl.arange(0, BLOCK_H)
                inside = column < H
                tl.store(target_at + column, tl.load(source_at + column, mask=inside), mask=inside)


@triton.jit
def build_tree_kernel(
    scores_ptr,  # [B, C] float32
    candidate_tokens_ptr,  # [B, C] int64
    candidate_parents_ptr,  # [B, PARENTS] int64
    root_tokens_ptr,  # [B] int64 | int32
    seq_lens_ptr,  # [B] int64 | int32
    tokens_ptr,  # [B, N] int64
    selected_ptr,  # [B, N - 1] int64
    parents_ptr,  # [B, N] int32
    depths_ptr,  # [B * N] int32
    positions_ptr,  # [B * N] int64
    mask_ptr,  # [B * N, W] int32
    retrieve_index_ptr,  # [B, N] int64
    next_token_ptr,  # [B, N] int64
    next_sibling_ptr,  # [B, N] int64
    byte_mask_ptr,  # MASK_KIND 1: [B, N, N] uint8; 2: rows of seq_len + N, request after request
    K: tl.constexpr,
    STEPS: tl.constexpr,
    C: tl.constexpr,
    PARENTS: tl.constexpr,
    N: tl.constexpr,
    W: tl.constexpr,
    MASK_KIND: tl.constexpr,
    TIES_BY_PLACE: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,  # at least N - 1
    BLOCK_PARENTS: tl.constexpr,
    BLOCK_W: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """The N - 1 best candidates of one request become nodes, in the order of the candidates.

    That order keeps a parent's children side by side, which makes the links local.
    """
    request = tl.program_id(0).to(tl.int64)
    wait_for_previous(USE_PDL)
    candidate = tl.arange(0, BLOCK_C)
    real = candidate < C
    score = tl.load(scores_ptr + request * C + candidate, mask=real, other=0.0)
    token = tl.load(candidate_tokens_ptr + request * C + candidate, mask=real, other=0)
    # Early, so that all that comes from memory is waited for once.
    entry = tl.arange(0, BLOCK_PARENTS)
    entries_at = candidate_parents_ptr + request * PARENTS + entry
    parent_of_beam = tl.load(entries_at, mask=entry < PARENTS, other=0).to(tl.int32)
    root_token = tl.load(root_tokens_ptr + request).to(tl.int64)
    seq_len = tl.load(seq_lens_ptr + request).to(tl.int64)
    start, width = byte_mask_place(seq_lens_ptr, request, seq_len, N, MASK_KIND)
    beyond = tl.maximum(candidate - K, 0)
    step = tl.where(candidate < K, 0, beyond // (K * K) + 1)
    place = tl.where(candidate < K, candidate, beyond % (K * K))
    tied = token * 0 if TIES_BY_PLACE else token
    keys = tl.where(real, candidate_key(score, step, tied, place), LOWEST_KEY)
    best = tl.topk(keys, BLOCK_K)
    worst = tl.max(tl.where(tl.arange(0, BLOCK_K) == N - 2, best, LOWEST_KEY), axis=0)
    chosen = real & (keys >= worst)
    node_of = tl.cumsum(chosen.to(tl.int32), axis=0)  # the root is node 0
    chosen = chosen & (node_of < N)
    tl.store(selected_ptr + request * (N - 1) + node_of - 1, candidate.to(tl.int64), mask=chosen)
    tl.store(tokens_ptr + request * N + node_of, token, mask=chosen)
    tl.store(tokens_ptr + request * N, root_token)

    node = tl.arange(0, BLOCK_N)
    at = request * N + node
    inside = node < N
    drafted = inside & (node > 0)
    tl.store(next_token_ptr + at, tl.full([BLOCK_N], -1, tl.int64), mask=inside)
    tl.debug_barrier()  # selected is read, next_token written again, by other threads
    mine = tl.load(selected_ptr + request * (N - 1) + node - 1, mask=drafted, other=0).to(tl.int32)
    deeper = drafted & (mine >= K)
    parent_candidate = tl.maximum(tl.gather(parent_of_beam, tl.maximum(mine, 0) // K, 0), 0)
    parent = tl.where(deeper, tl.gather(node_of, parent_candidate, 0), tl.where(drafted, 0, -1))
    depth = tl.where(deeper, (mine - K) // (K * K) + 2, tl.where(drafted, 1, 0))
    tl.store(parents_ptr + at, parent, mask=inside)
    tl.store(depths_ptr + at, depth, mask=inside)
    tl.store(positions_ptr + at, seq_len + depth, mask=inside)

    previous = tl.gather(parent, tl.maximum(node - 1, 0), 0)
    following = tl.gather(parent, tl.minimum(node + 1, BLOCK_N - 1), 0)
    first_child = drafted & (previous != parent)
    sibling = tl.where(drafted & (node + 1 < N) & (following == parent), node + 1, -1)
    tl.store(retrieve_index_ptr + at, at, mask=inside)
    tl.store(next_token_ptr + request * N + parent, node.to(tl.int64), mask=first_child)
    tl.store(next_sibling_ptr + at, sibling.to(tl.int64), mask=inside)

    word = tl.arange(0, BLOCK_W)[None, :]
    ancestor = node
    bits = tl.where(word == (ancestor // 32)[:, None], (1 << (ancestor % 32))[:, None], 0)
    for _ in range(STEPS):
        ancestor = tl.maximum(tl.gather(parent, ancestor, 0), 0)
        bits |= tl.where(word == (ancestor // 32)[:, None], (1 << (ancestor % 32))[:, None], 0)
    tl.store(mask_ptr + at[:, None] * W + word, bits, mask=inside[:, None] & (word < W))
    if MASK_KIND != 0:
        for w in range(W):
            column = w * 32 + tl.arange(0, 32)[None, :]
            seen = (tl.sum(tl.where(word == w, bits, 0), axis=1)[:, None] >> (column % 32)) & 1
            target = byte_mask_ptr + start + node[:, None] * width + column
            tl.store(target, seen.to(tl.uint8), mask=inside[:, None] & (column < N))


@triton.jit
def byte_mask_place(seq_lens_ptr, request, seq_len, N: tl.constexpr, MASK_KIND: tl.constexpr):
    """Where the request's first node-by-node row starts, and the length of its rows."""
    if MASK_KIND != FULL_MASK:
        return request * N * N, seq_len * 0 + N
    before = seq_len * 0
    for start in range(0, request, 128):
        other = start + tl.arange(0, 128)
        lens = tl.load(seq_lens_ptr + other, mask=other < request, other=0)
        before += tl.sum(lens.to(tl.int64), axis=0)
    return (before + request * N) * N + seq_len, seq_len + N
