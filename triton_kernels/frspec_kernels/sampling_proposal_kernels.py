# ruff: noqa: ANN001, ANN201 (values inside a kernel have no Python types)
# pyright: reportOperatorIssue=false, reportAttributeAccessIssue=false
# pyright: reportArgumentType=false, reportCallIssue=false
"""The kernel behind :mod:`frspec_kernels.sampling_proposal`."""

import triton
import triton.language as tl

from .pdl import wait_for_previous
from .primitives import LOWEST_KEY, score_order, sortable_key
from .sampling_random import DRAW, exponential, random_words

# A candidate of less weight than 2**-100 of the best one's has probability 0. What is left are
# normal float32 numbers, sums and quotients of them too.
LEAST_WEIGHT = tl.constexpr(7.888609052210118e-31)


@triton.jit(do_not_specialize=["depth"])  # steps share a kernel
def draw_children_kernel(
    probs_ptr,  # [B * ROWS, C] float32, descending
    token_ids_ptr,  # [B * ROWS, C] int64
    temperatures_ptr,  # [B] float32
    seq_lens_ptr,  # [B] int64 | int32
    seeds_ptr,  # [B] int64
    children_ptr,  # [B * ROWS, K] int64
    scores_ptr,  # [B * ROWS, K] float32
    q_ptr,  # [B * ROWS, C] float32
    depth,
    ROWS: tl.constexpr,
    C: tl.constexpr,
    K: tl.constexpr,
    FIXED: tl.constexpr,
    BLOCK_C: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """Program row: its K children, the scores of their places, and the list's q."""
    row = tl.program_id(0).to(tl.int64)
    request, beam = row // ROWS, row % ROWS
    wait_for_previous(USE_PDL)
    lane = tl.arange(0, BLOCK_C)
    p = tl.load(probs_ptr + row * C + lane, mask=lane < C, other=0.0)
    ids = tl.load(token_ids_ptr + row * C + lane, mask=lane < C, other=0)
    usable = (p > 0) & (lane < C)
    best = tl.max(tl.where(usable, p, 0.0), axis=0)
    temperature = tl.load(temperatures_ptr + request)
    greedy = temperature < 1.1754943508222875e-38
    cold = greedy | (best <= 0)
    power = tl.log2(tl.where(usable, p / best, 1.0)) / tl.where(cold, 1.0, temperature)
    weights = tl.where(usable, tl.where(cold, p, tl.exp2(power)), 0.0)
    weights = tl.where(weights >= tl.where(greedy, 0.0, LEAST_WEIGHT), weights, 0.0)
    total = tl.sum(weights, axis=0)
    q = weights / tl.where((total > 0) & (greedy == 0), total, 1.0)
    tl.store(q_ptr + row * C + lane, q, mask=lane < C)

    token = tl.maximum(ids, 0)
    position = tl.load(seq_lens_ptr + request).to(tl.int64)
    seed = tl.load(seeds_ptr + request)
    a, b, c, d = random_words(
        seed, (token // 4).to(tl.int32), position, DRAW, lane * 0 + depth, lane * 0 + beam
    )  # fmt: skip
    word = token % 4
    words = tl.where(word < 2, tl.where(word == 0, a, b), tl.where(word == 2, c, d))
    # The race's order is that of drawing without replacement. Candidates of probability 0 come
    # last, in the list's order: they fill places that would stay empty, and chance has no part in
    # which they are.
    speeds = tl.where(q > 0, tl.where(greedy, q, q / exponential(words)), -1.0 - lane)
    keys = sortable_key(score_order(speeds), token)
    keys = tl.where((lane >= FIXED) & (lane < C), keys, LOWEST_KEY)
    for place in range(K):
        if place < FIXED:
            taken = lane == place
            score = tl.sum(tl.where(taken, q, 0.0), axis=0)
        else:
            taken = keys == tl.max(keys, axis=0)
            # What is known before the draw: the mass that it is made from. A greedy request draws
            # nothing: its child is the next best candidate.
            known = tl.where(greedy, taken, lane >= FIXED)
            score = tl.sum(tl.where(known, q, 0.0), axis=0)
        tl.store(children_ptr + row * K + place, tl.sum(tl.where(taken, ids, 0), axis=0))
        tl.store(scores_ptr + row * K + place, score)
        q = tl.where(taken, 0.0, q)
        keys = tl.where(taken, LOWEST_KEY, keys)
