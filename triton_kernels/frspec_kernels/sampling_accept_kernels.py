# ruff: noqa: ANN001, ANN201 (values inside a kernel have no Python types)
# pyright: reportOperatorIssue=false, reportAttributeAccessIssue=false
# pyright: reportArgumentType=false, reportCallIssue=false
"""Kernels that verify a sampled draft tree; see :mod:`frspec_kernels.sampling` for the terms."""

import triton
import triton.language as tl

from .pdl import wait_for_previous
from .primitives import LOWEST_KEY, key_score, key_token_id, score_order, sortable_key
from .sampling_filter_kernels import (
    base_two_slope,
    is_cut,
    is_greedy_row,
    load_orders,
    row_of_slot,
    softmax_state,
)
from .sampling_pivot_kernels import kept_set
from .sampling_random import (
    ACCEPT,
    RESIDUAL,
    exponential,
    random_words,
    random_words_of_ids,
    uniform,
)
from .split_merge import pick


@triton.jit
def weight_of(logits, orders, ids, pivot, maximum, slope):
    """exp((x - m) / T) of kept tokens, else 0; the pivot of a greedy row is its best key."""
    kept = sortable_key(orders, ids) >= pivot
    greedy = slope == 0.0
    weights = tl.exp2((logits - maximum) * tl.where(greedy, 1.0, slope))
    return tl.where(kept, tl.where(greedy, 1.0, weights), 0.0)


@triton.jit(do_not_specialize=["R"])
def decide_children_kernel(
    logits_ptr,  # [B * N, V]
    current_ptr,  # [B] int32 or None
    tokens_ptr,  # [B, N] int64
    parents_ptr,  # [B, N] int32
    seq_lens_ptr,  # [B] int64 | int32
    seeds_ptr,  # [B] int64
    temperatures_ptr,  # [B] float32
    top_ks_ptr,  # [B] int32
    top_ps_ptr,  # [B] float32
    min_ps_ptr,  # [B] float32
    drawn_ptr,  # [B, N] int8, or None: no child was drawn
    list_rows_ptr,  # [B, N] int32
    list_ids_ptr,  # [B, R, C] int64
    list_q_ptr,  # [B, R, C] float32
    best_keys_ptr,  # [slots, P] int64
    sums_ptr,  # [slots, P] float32
    brackets_ptr,  # [L + 1, slots, 2] int32
    masses_above_ptr,  # [slots, P] int64
    counts_ptr,  # [slots] int32
    candidates_ptr,  # [slots, V + FEW] int64
    next_ptr,  # [B, N] int32: the accepted child, or -1
    pivots_ptr,  # [slots] int64
    slopes_ptr,  # [slots] float32
    left_ids_ptr,  # [slots, BLOCK_N + BLOCK_C] int64, -1 where unused
    left_weights_ptr,  # [slots, BLOCK_N + BLOCK_C] float32
    V,
    stride_logits,
    threshold_single,
    threshold_acc,
    R,
    N: tl.constexpr,
    C: tl.constexpr,
    FIXED: tl.constexpr,
    P: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK: tl.constexpr,
    LEVELS: tl.constexpr,
    ID_BITS: tl.constexpr,
    SHRINK_FROM: tl.constexpr,
    FEW: tl.constexpr,
    TRUNCATES: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """Program slot: which child of the slot's node is accepted, and what is left if none is.

    What is left is the row's own weights, except for the ids in ``left_ids``.
    """
    slot = tl.program_id(0).to(tl.int64)
    wait_for_previous(USE_PDL)
    row, request, node = row_of_slot(current_ptr, slot, N)
    if node < 0:
        return
    slope = base_two_slope(temperatures_ptr, request)
    top_k = tl.load(top_ks_ptr + request)
    best_key, maximum, total = softmax_state(best_keys_ptr, sums_ptr, slot, slope, P, BLOCK_P)
    pivot = tl.zeros([], tl.int64) + LOWEST_KEY
    if is_greedy_row(maximum, slope, top_k):
        slope = slope * 0.0
        pivot, total = best_key, total * 0.0 + 1.0
        total = tl.where(total == total, total, 1.0)
    elif TRUNCATES:
        top_p = tl.load(top_ps_ptr + request)
        min_p = tl.load(min_ps_ptr + request)
        by_top_k, cut = is_cut(top_k, top_p, min_p, V)
        if cut:
            bracket = brackets_ptr + 2 * (LEVELS * tl.num_programs(0).to(tl.int64) + slot)
            part = tl.arange(0, BLOCK_P)
            above = tl.load(masses_above_ptr + slot * P + part, mask=part < P, other=0)
            candidates = candidates_ptr + slot * (V + FEW)
            pivot, total = kept_set(
                candidates, candidates + V, tl.load(counts_ptr + slot), tl.load(bracket),
                tl.load(bracket + 1), best_key, maximum, total, tl.sum(above, axis=0), slope,
                top_k, top_p, min_p, by_top_k, ID_BITS, SHRINK_FROM, FEW, BLOCK,
            )  # fmt: skip

    at = request * N
    idx = tl.arange(0, BLOCK_N)
    parents = tl.load(parents_ptr + at + idx, mask=idx < N, other=-2)
    child = (parents == node) & (idx > 0)
    token = tl.load(tokens_ptr + at + idx, mask=child, other=-1)
    child = child & (token >= 0) & (token < V)
    drawn = idx < 0
    if drawn_ptr is not None:
        drawn = child & (tl.load(drawn_ptr + at + idx, mask=idx < N, other=0) != 0)
    fixed = child & (drawn == 0)
    logits, orders = load_orders(logits_ptr, row, stride_logits, tl.where(child, token, V), V)
    p = tl.where(child, weight_of(logits, orders, token, pivot, maximum, slope) / total, 0.0)

    depth = node * 0
    above = node
    while above > 0:  # a parent comes before its child, in padding too
        above = tl.minimum(tl.load(parents_ptr + at + above).to(tl.int64), above - 1)
        depth += 1
    branch = tl.cumsum(child.to(tl.int32), axis=0) - 1
    seed = tl.load(seeds_ptr + request)
    position = tl.load(seq_lens_ptr + request).to(tl.int64)
    words, _, _, _ = random_words(seed, idx * 0, position, ACCEPT, depth.to(tl.int32), branch)
    coin = uniform(words)

    p_fixed = tl.where(fixed, p, 0.0)
    before = tl.cumsum(p_fixed, axis=0) - p_fixed
    # coin < p / (t - p of those before), without dividing by 0
    accepted = fixed & ((coin * (threshold_acc - before) < p) | (p >= threshold_single))
    accepted = accepted & (p > 0)
    chosen = tl.min(tl.where(accepted, idx, BLOCK_N), axis=0)
    rejected_mass = tl.sum(p_fixed, axis=0)
    width: tl.constexpr = BLOCK_N + BLOCK_C
    tl.store(left_ids_ptr + slot * width + idx, tl.where(fixed, token, -1))
    tl.store(left_weights_ptr + slot * width + idx, idx * 0.0)

    if drawn_ptr is not None:
        lane = tl.arange(0, BLOCK_C)
        list_row = tl.load(list_rows_ptr + at + node).to(tl.int64)
        listed = tl.where(list_row >= 0, lane, C) < C
        list_at = (request * R + list_row) * C + lane
        ids = tl.load(list_ids_ptr + list_at, mask=listed, other=-1)
        listed = listed & (ids >= 0) & (ids < V)
        q = tl.load(list_q_ptr + list_at, mask=listed & (lane >= FIXED), other=0.0)
        q = tl.where(q > 0, q, 0.0)
        logits, orders = load_orders(logits_ptr, row, stride_logits, tl.where(listed, ids, V), V)
        left = weight_of(logits, orders, ids, pivot, maximum, slope) / total
        is_fixed = tl.max((fixed[:, None] & (token[:, None] == ids[None, :])).to(tl.int32), axis=0)
        left = tl.where(listed & (is_fixed == 0), left, 0.0)
        # left + rest = 1: on the list, and off it
        mass = tl.maximum(1.0 - rejected_mass, 0.0)
        rest = tl.maximum(mass - tl.sum(left, axis=0), 0.0)
        scale = tl.where(mass > 0, 1.0 / tl.where(mass > 0, mass, 1.0), 1.0)
        left, rest = left * scale, rest * scale
        turn = tl.min(tl.where(drawn, idx, BLOCK_N), axis=0)
        while (chosen == BLOCK_N) & (turn < BLOCK_N):
            here = listed & (ids == pick(token, turn, BLOCK_N))
            # With no mass left to draw from, the child is the list's next candidate for certain.
            drawable = tl.sum(q, axis=0)
            certain = tl.where(here, 1.0, 0.0)
            proposed = tl.where(drawable > 0, q / tl.where(drawable > 0, drawable, 1.0), certain)
            p_here = tl.sum(tl.where(here, left, 0.0), axis=0)
            q_here = tl.sum(tl.where(here, proposed, 0.0), axis=0)
            if (q_here > 0) & (pick(coin, turn, BLOCK_N) * q_here < p_here):
                chosen = turn
            else:
                left = tl.maximum(left - proposed, 0.0)
                norm = tl.sum(left, axis=0) + rest
                factor = tl.where(norm > 0, 1.0 / tl.where(norm > 0, norm, 1.0), 1.0)
                left, rest, scale = left * factor, rest * factor, scale * factor
                q = tl.where(here, 0.0, q)
                turn = tl.min(tl.where(drawn & (idx > turn), idx, BLOCK_N), axis=0)
        at_list = slot * width + BLOCK_N + lane
        tl.store(left_ids_ptr + at_list, tl.where(listed, ids, -1), mask=lane < BLOCK_C)
        # In the unit of the row's weights, whose factor up to here was scale / total.
        tl.store(left_weights_ptr + at_list, left * (total / scale), mask=lane < BLOCK_C)

    next_node = tl.where(chosen < BLOCK_N, chosen, -1)
    tl.store(next_ptr + request * N + node, next_node)
    tl.store(pivots_ptr + slot, pivot)
    tl.store(slopes_ptr + slot, slope)
    if current_ptr is not None:
        tl.store(current_ptr + slot, next_node)


@triton.jit
def walk(next_ptr, request, N: tl.constexpr, D: tl.constexpr, BLOCK_N: tl.constexpr):
    """Last node of the accepted path, and its depth."""
    idx = tl.arange(0, BLOCK_N)
    following = tl.load(next_ptr + request * N + idx, mask=idx < N, other=-1)
    node, depth = tl.zeros([], tl.int32), tl.zeros([], tl.int32)
    for _ in range(D - 1):
        child = pick(following, node, BLOCK_N)
        depth += (child >= 0).to(tl.int32)
        node = tl.where(child >= 0, child, node)
    return node, depth


@triton.jit
def race_kernel(
    logits_ptr,  # [B * N, V]
    seq_lens_ptr,  # [B] int64 | int32
    seeds_ptr,  # [B] int64
    best_keys_ptr,  # [slots, P] int64
    next_ptr,  # [B, N] int32
    pivots_ptr,  # [slots] int64
    slopes_ptr,  # [slots] float32
    left_ids_ptr,  # [slots, LEFT] int64
    left_weights_ptr,  # [slots, LEFT] float32
    race_keys_ptr,  # [B, P] int64
    V,
    stride_logits,
    N: tl.constexpr,
    D: tl.constexpr,
    P: tl.constexpr,
    SLICE: tl.constexpr,
    LEFT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BY_ROW: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """Program (b, p): winner of the exponential race among slice p of the last node's row.

    Of exponential times E / w the smallest is x's with probability w(x) / sum(w); the largest w / E
    is kept, equal ones by the smaller id.
    """
    request, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    wait_for_previous(USE_PDL)
    node, depth = walk(next_ptr, request, N, D, BLOCK_N)
    row = request * N + node
    slot = row if BY_ROW else request
    parts = tl.arange(0, BLOCK_P)
    keys = tl.load(best_keys_ptr + slot * P + parts, mask=parts < P, other=LOWEST_KEY)
    maximum = key_score(tl.max(keys, axis=0))
    pivot, slope = tl.load(pivots_ptr + slot), tl.load(slopes_ptr + slot)
    first = part * SLICE
    ids = first + tl.arange(0, SLICE)
    logits, orders = load_orders(logits_ptr, row, stride_logits, ids, V)
    weights = weight_of(logits, orders, ids, pivot, maximum, slope)
    weights = tl.where(ids < V, weights, 0.0)

    slots = tl.arange(0, LEFT)
    left_ids = tl.load(left_ids_ptr + slot * LEFT + slots)
    left_weights = tl.load(left_weights_ptr + slot * LEFT + slots)
    here = (left_ids >= first) & (left_ids < first + SLICE)
    place = tl.min(tl.where(here, slots, LEFT), axis=0)
    while place < LEFT:
        weights = tl.where(
            ids == pick(left_ids, place, LEFT), pick(left_weights, place, LEFT), weights
        )  # fmt: skip
        place = tl.min(tl.where(here & (slots > place), slots, LEFT), axis=0)

    seed = tl.load(seeds_ptr + request)
    position = tl.load(seq_lens_ptr + request).to(tl.int64)
    words = random_words_of_ids(seed, first, position, RESIDUAL, depth, depth * 0, SLICE)
    speeds = weights / exponential(words)
    keys = tl.where(weights > 0, sortable_key(score_order(speeds), ids), LOWEST_KEY)
    tl.store(race_keys_ptr + request * P + part, tl.max(keys, axis=0))


@triton.jit
def finish_sampled_kernel(
    tokens_ptr,  # [B, N] int64
    seq_lens_ptr,  # [B] int64 | int32
    slots_ptr,  # [B * N] int64 | int32, or None
    best_keys_ptr,  # [slots, P] int64
    next_ptr,  # [B, N] int32
    race_keys_ptr,  # [B, P] int64
    accept_index_ptr,  # [B, D] int32
    accept_lens_ptr,  # [B] int32
    predicts_ptr,  # [B * N] int32
    path_tokens_ptr,  # [B, D] int64
    bonus_tokens_ptr,  # [B] int64
    new_seq_lens_ptr,  # [B] int64
    source_slots_ptr,  # [B, D] int64 or None
    target_slots_ptr,  # [B, D] int64 or None
    N: tl.constexpr,
    D: tl.constexpr,
    P: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BY_ROW: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """Program b: the outcome of request b, from the path and the race."""
    request = tl.program_id(0).to(tl.int64)
    wait_for_previous(USE_PDL)
    idx, place = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
    following = tl.load(next_ptr + request * N + idx, mask=idx < N, other=-1)
    tokens = tl.load(tokens_ptr + request * N + idx, mask=idx < N, other=0)
    part = tl.arange(0, BLOCK_P)
    last, depth = walk(next_ptr, request, N, D, BLOCK_N)
    slot = request * N + last if BY_ROW else request
    keys = tl.load(race_keys_ptr + request * P + part, mask=part < P, other=LOWEST_KEY)
    winner = tl.max(keys, axis=0)
    best = tl.load(best_keys_ptr + slot * P + part, mask=part < P, other=LOWEST_KEY)
    # Rounding can leave nothing to draw from after a rejection of probability 0.
    winner = tl.where(winner == LOWEST_KEY, tl.max(best, axis=0), winner)
    bonus = key_token_id(winner)

    node = tl.zeros([], tl.int32)
    path_node = place * 0 - 1
    path_token = (place * 0).to(tl.int64)
    predicts = (idx * 0).to(tl.int64)
    for level in range(D):
        if level <= depth:
            child = pick(following, node, BLOCK_N)
            token = tl.where(level == depth, bonus, pick(tokens, tl.maximum(child, 0), BLOCK_N))
            path_node = tl.where(place == level, node, path_node)
            path_token = tl.where(place == level, token, path_token)
            predicts = tl.where(idx == node, token, predicts)
            node = child
    used = path_node >= 0
    path_at = request * D + place
    index = tl.where(used, request * N + path_node, -1)
    tl.store(accept_index_ptr + path_at, index.to(tl.int32), mask=place < D)
    tl.store(path_tokens_ptr + path_at, path_token, mask=place < D)
    tl.store(predicts_ptr + request * N + idx, predicts.to(tl.int32), mask=idx < N)
    tl.store(accept_lens_ptr + request, depth + 1)
    tl.store(bonus_tokens_ptr + request, bonus)
    length = tl.load(seq_lens_ptr + request).to(tl.int64)
    tl.store(new_seq_lens_ptr + request, length + depth + 1)
    if slots_ptr is not None:
        front = request * N + tl.minimum(place, N - 1)
        source = tl.where(used, request * N + path_node, front)
        front_slot = tl.load(slots_ptr + front).to(tl.int64)
        source_slot = tl.load(slots_ptr + source).to(tl.int64)
        tl.store(target_slots_ptr + path_at, front_slot, mask=place < D)
        tl.store(source_slots_ptr + path_at, source_slot, mask=place < D)
