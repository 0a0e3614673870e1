# ruff: noqa: ANN001, ANN201 (values inside a kernel have no Python types)
# pyright: reportOperatorIssue=false, reportAttributeAccessIssue=false
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
"""Where a row's truncation ends, by many programs: scores that enclose it, and the keys between.

A **bracket** is two orders [low, high): the smallest kept score is not below ``low``, and below
``high`` unless both are equal. Each of L levels measures, part by part, the mass from each of E
edges on, which cuts the bracket into E pieces; the next launch takes the piece where the mass is
reached. Sums are float32 here, so an edge decides only where the mass is clear by more than their
error. The exact decision is left to the keys that remain, which are collected, and to the mass
above them, in integers.

A top-k of at most the number of groups needs no levels: the k-th largest maximum is a bound. A
larger one counts tokens in place of mass. With a top-k, keys are collected up to the best: the mass
that top-p is a share of is known only when the top-k is.
"""

import triton
import triton.language as tl

from .pdl import wait_for_previous
from .primitives import (
    HIGHEST_ORDER,
    LOWEST_ORDER,
    order_score,
    score_order,
    sortable_key,
)
from .sampling_filter_kernels import (
    LEAST_SCORE,
    MASS_UNIT,
    base_two_slope,
    is_cut,
    is_greedy_row,
    orders_of,
    row_of_slot,
    share_order,
    softmax_state,
)

# Tokens that far below the best, as powers of two, weigh 0 as integers.
REACH = tl.constexpr(64.0)
# Of a sum of float32, and of a weight rounded to an integer: several times what they can be.
RELATIVE_ERROR = tl.constexpr(2.0**-16)
ROUNDED = tl.constexpr(2.0**-39)
BRANCHES = tl.constexpr(8)  # of a pass over the groups' maxima


@triton.jit
def load_truncation(
    top_ks_ptr, top_ps_ptr, min_ps_ptr, request, V, GROUP_SIZE: tl.constexpr
):  # fmt: skip
    """Top-k, top-p and min-p; whether top-k cuts, whether groups bound it, whether anything cuts.

    The k-th largest maximum is a bound where there are at least k groups.
    """
    top_k = tl.load(top_ks_ptr + request)
    top_p = tl.load(top_ps_ptr + request)
    min_p = tl.load(min_ps_ptr + request)
    by_top_k, cut = is_cut(top_k, top_p, min_p, V)
    return top_k, top_p, min_p, by_top_k, by_top_k & (top_k <= V // GROUP_SIZE), cut


@triton.jit
def kth_order(orders, best_order, top_k):
    """An order that at least ``top_k`` of ``orders`` [G] reach, or the lowest finite one.

    Of 2**32 orders up to 2,048 stay undecided: a few more candidates.
    """
    branch = tl.arange(0, BRANCHES)
    low = score_order(tl.full([], LEAST_SCORE, tl.float32)).to(tl.int64)
    high = best_order.to(tl.int64) + 1
    for _ in range(7):
        step = tl.maximum((high - low) // BRANCHES, 1)
        pivots = (low + branch.to(tl.int64) * step).to(tl.int32)
        counts = tl.sum((orders[None, :] >= pivots[:, None]).to(tl.int32), axis=1)
        last = tl.maximum(tl.sum((counts >= top_k).to(tl.int32), axis=0) - 1, 0)
        low += last.to(tl.int64) * step
        high = tl.where(last < BRANCHES - 1, tl.minimum(high, low + step), high)
    return low.to(tl.int32)


@triton.jit
def first_bracket(maximum, total, slope, by_top_k, top_p, min_p, V):
    """The bracket before any mass is measured.

    Tokens of probability below (1 - top_p) / V hold less than 1 - top_p together, so top-p never
    reaches them. min-p alone is a score, and the bracket is empty.
    """
    # A little lower than exact, for what is rounded.
    share = tl.where(top_p < 1.0, total * (1.0 - top_p) / V * 0.999, 0.0)
    least = tl.where(by_top_k, 1.0, tl.maximum(share, min_p))
    lowest = score_order(tl.full([], LEAST_SCORE, tl.float32))
    low = tl.where(by_top_k, lowest, share_order(maximum, slope, least))
    return low, tl.where(by_top_k | (top_p < 1.0), HIGHEST_ORDER, low)


@triton.jit
def edges_of(low, high, maximum, slope, EDGES: tl.constexpr):
    """[E] orders that cut the bracket into pieces of equal score."""
    top = order_score(tl.minimum(high, score_order(maximum)))
    bottom = tl.maximum(order_score(low), top - REACH / slope)
    share = tl.arange(0, EDGES).to(tl.float32) / EDGES
    return score_order(bottom * (1.0 - share) + top * share)


@triton.jit
def next_bracket(
    brackets_ptr,  # [L + 1, slots, 2] int32
    edges_ptr,  # [L, slots, E] int32
    edge_masses_ptr,  # [L, slots, P, E] float32
    level,
    slot,
    total,
    by_top_k,
    by_group,
    top_k,
    top_p,
    V,
    P: tl.constexpr,
    BLOCK_P: tl.constexpr,
    EDGES: tl.constexpr,
):
    """The bracket of a level, cut by what was measured at it."""
    at = level * tl.num_programs(0).to(tl.int64) + slot
    low, high = tl.load(brackets_ptr + 2 * at), tl.load(brackets_ptr + 2 * at + 1)
    # Loaded whether measured or not, not to wait for the bracket first.
    edge, part = tl.arange(0, EDGES), tl.arange(0, BLOCK_P)
    orders = tl.load(edges_ptr + at * EDGES + edge)
    masses_at = edge_masses_ptr + (at * P + part[None, :]) * EDGES + edge[:, None]
    masses = tl.sum(tl.load(masses_at, mask=part[None, :] < P, other=0.0), axis=1)
    measured = (low < high) & (by_group == 0)
    wanted = tl.where(by_top_k, top_k.to(tl.float32), total * top_p)
    error = tl.where(by_top_k, 0.0, wanted * RELATIVE_ERROR + V * ROUNDED)
    reached = measured & (masses >= wanted + error)
    missed = measured & (masses < wanted - error)
    low = tl.maximum(low, tl.max(tl.where(reached, orders, LOWEST_ORDER), axis=0))
    high = tl.minimum(high, tl.min(tl.where(missed, orders, HIGHEST_ORDER), axis=0))
    return low, high


@triton.jit
def needed_blocks(group_orders_ptr, at, low, GROUPS: tl.constexpr, BLOCKS: tl.constexpr):
    """Bit b: whether block b of a slice, whose first group is ``at``, reaches ``low``."""
    orders = tl.load(group_orders_ptr + at + tl.arange(0, GROUPS))
    best = tl.max(tl.reshape(orders, [BLOCKS, GROUPS // BLOCKS]), axis=1)
    return tl.sum(tl.where(best >= low, 1 << tl.arange(0, BLOCKS), 0), axis=0)


@triton.jit
def load_block(logits_ptr, row, stride, first, block, needed, V, BLOCK: tl.constexpr):
    """Logits of block ``block`` of the slice from ``first`` on, minus infinity if not needed."""
    ids = first + block * BLOCK + tl.arange(0, BLOCK)
    end = tl.where(((needed >> block) & 1) == 1, V, 0)
    return tl.load(logits_ptr + row * stride + ids, mask=ids < end, other=float("-inf"))


@triton.jit
def narrow_bracket_kernel(
    logits_ptr,  # [B * N, V]
    current_ptr,  # [B] int32 or None
    temperatures_ptr,  # [B] float32
    top_ks_ptr,  # [B] int32
    top_ps_ptr,  # [B] float32
    min_ps_ptr,  # [B] float32
    best_keys_ptr,  # [slots, P] int64
    sums_ptr,  # [slots, P] float32
    group_orders_ptr,  # [slots, P * GROUPS] int32
    brackets_ptr,  # [L + 1, slots, 2] int32
    edges_ptr,  # [L, slots, E] int32
    edge_masses_ptr,  # [L, slots, P, E] float32
    counts_ptr,  # [slots] int32
    V,
    stride_logits,
    LEVEL: tl.constexpr,
    N: tl.constexpr,
    P: tl.constexpr,
    BLOCK_P: tl.constexpr,
    SLICE: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK_G: tl.constexpr,
    EDGES: tl.constexpr,
    BLOCK: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """Program (slot, p): the bracket of this level, and the mass of slice p from its edges on."""
    slot, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    wait_for_previous(USE_PDL)
    row, request, node = row_of_slot(current_ptr, slot, N)
    if node < 0:
        return
    slope = base_two_slope(temperatures_ptr, request)
    top_k, top_p, min_p, by_top_k, by_group, cut = load_truncation(
        top_ks_ptr, top_ps_ptr, min_ps_ptr, request, V, SLICE // GROUPS
    )
    first = part * SLICE
    BLOCKS: tl.constexpr = SLICE // BLOCK
    # Nearly every block reaches the first bracket: two are asked for before that is known.
    needed = tl.where((LEVEL == 0) & cut & (by_group == 0), (1 << BLOCKS) - 1, 0)
    this = load_block(logits_ptr, row, stride_logits, first, 0, needed, V, BLOCK)
    next_one = load_block(logits_ptr, row, stride_logits, first, 1, needed, V, BLOCK)
    best_key, maximum, total = softmax_state(best_keys_ptr, sums_ptr, slot, slope, P, BLOCK_P)
    idle = is_greedy_row(maximum, slope, top_k) | (cut == 0)
    if idle | (by_group & (part > 0)):
        return
    if LEVEL == 0:
        low, high = first_bracket(maximum, total, slope, by_top_k, top_p, min_p, V)
        if by_group:
            group = tl.arange(0, BLOCK_G)
            at = group_orders_ptr + slot * (P * GROUPS) + group
            orders = tl.load(at, mask=group < P * GROUPS, other=LOWEST_ORDER)
            low = kth_order(orders, (best_key >> 32).to(tl.int32), top_k)
        if part == 0:
            tl.store(counts_ptr + slot, 0)
    else:
        low, high = next_bracket(
            brackets_ptr, edges_ptr, edge_masses_ptr, LEVEL - 1, slot, total, by_top_k, by_group,
            top_k, top_p, V, P, BLOCK_P, EDGES,
        )  # fmt: skip
    at = LEVEL * tl.num_programs(0).to(tl.int64) + slot
    if part == 0:
        tl.store(brackets_ptr + 2 * at, low)
        tl.store(brackets_ptr + 2 * at + 1, high)
    if by_group | (low >= high):
        return
    edges = edges_of(low, high, maximum, slope, EDGES)
    edge = tl.arange(0, EDGES)
    if part == 0:
        # The next launch reads them: recomputed there, they might be rounded in another way.
        tl.store(edges_ptr + at * EDGES + edge, edges)
    masses = tl.zeros([EDGES, BLOCK], tl.float32)
    if LEVEL > 0:
        needed = needed_blocks(group_orders_ptr, (slot * P + part) * GROUPS, low, GROUPS, BLOCKS)
        this = load_block(logits_ptr, row, stride_logits, first, 0, needed, V, BLOCK)
        next_one = load_block(logits_ptr, row, stride_logits, first, 1, needed, V, BLOCK)
    for block in tl.static_range(BLOCKS):
        raw = this
        this = next_one
        if block + 2 < BLOCKS:
            next_one = load_block(
                logits_ptr, row, stride_logits, first, block + 2, needed, V, BLOCK
            )
        if ((needed >> block) & 1) == 1:
            logits, orders = orders_of(raw)
            weights = tl.where(by_top_k, 1.0, tl.exp2((logits - maximum) * slope))
            masses = tl.where(
                orders[None, :] >= edges[:, None], masses + weights[None, :], masses
            )  # fmt: skip
    tl.store(edge_masses_ptr + (at * P + part) * EDGES + edge, tl.sum(masses, axis=1))


@triton.jit
def collect_candidates_kernel(
    logits_ptr,  # [B * N, V]
    current_ptr,  # [B] int32 or None
    temperatures_ptr,  # [B] float32
    top_ks_ptr,  # [B] int32
    top_ps_ptr,  # [B] float32
    min_ps_ptr,  # [B] float32
    best_keys_ptr,  # [slots, P] int64
    sums_ptr,  # [slots, P] float32
    group_orders_ptr,  # [slots, P * GROUPS] int32
    brackets_ptr,  # [L + 1, slots, 2] int32
    edges_ptr,  # [L, slots, E] int32
    edge_masses_ptr,  # [L, slots, P, E] float32
    masses_above_ptr,  # [slots, P] int64
    counts_ptr,  # [slots] int32
    candidates_ptr,  # [slots, V + FEW] int64
    V,
    stride_logits,
    LEVELS: tl.constexpr,
    N: tl.constexpr,
    P: tl.constexpr,
    BLOCK_P: tl.constexpr,
    SLICE: tl.constexpr,
    GROUPS: tl.constexpr,
    EDGES: tl.constexpr,
    FEW: tl.constexpr,
    BLOCK: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """Program (slot, p): keys of slice p in the last bracket, to the slot's list; mass above it."""
    slot, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    wait_for_previous(USE_PDL)
    row, request, node = row_of_slot(current_ptr, slot, N)
    if node < 0:
        return
    slope = base_two_slope(temperatures_ptr, request)
    top_k, top_p, _min_p, by_top_k, by_group, cut = load_truncation(
        top_ks_ptr, top_ps_ptr, min_ps_ptr, request, V, SLICE // GROUPS
    )
    _best_key, maximum, total = softmax_state(best_keys_ptr, sums_ptr, slot, slope, P, BLOCK_P)
    if is_greedy_row(maximum, slope, top_k) | (cut == 0):
        return
    low, high = next_bracket(
        brackets_ptr, edges_ptr, edge_masses_ptr, LEVELS - 1, slot, total, by_top_k, by_group,
        top_k, top_p, V, P, BLOCK_P, EDGES,
    )  # fmt: skip
    high = tl.where(by_top_k, HIGHEST_ORDER, high)
    if part == 0:
        at = LEVELS * tl.num_programs(0).to(tl.int64) + slot
        tl.store(brackets_ptr + 2 * at, low)
        tl.store(brackets_ptr + 2 * at + 1, high)
    first = part * SLICE
    BLOCKS: tl.constexpr = SLICE // BLOCK
    needed = needed_blocks(group_orders_ptr, (slot * P + part) * GROUPS, low, GROUPS, BLOCKS)
    above = tl.zeros([BLOCK], tl.int64)
    number = tl.zeros([BLOCK], tl.int32)
    for block in tl.static_range(BLOCKS):
        # What is not loaded is minus infinity, below any bracket.
        raw = load_block(logits_ptr, row, stride_logits, first, block, needed, V, BLOCK)
        logits, orders = orders_of(raw)
        weights = tl.exp2((logits - maximum) * slope) * MASS_UNIT
        above += tl.where(orders >= high, weights, 0.0).to(tl.int64)
        number += ((orders >= low) & (orders < high)).to(tl.int32)
    tl.store(masses_above_ptr + slot * P + part, tl.sum(above, axis=0))
    count = tl.sum(number, axis=0)
    if count == 0:
        return
    # Loaded again, from the cache, rather than held: fewer registers, more programs at once.
    start = tl.atomic_add(counts_ptr + slot, count)
    for block in range(BLOCKS):
        raw = load_block(logits_ptr, row, stride_logits, first, block, needed, V, BLOCK)
        _logits, orders = orders_of(raw)
        wanted = (orders >= low) & (orders < high)
        place = slot * (V + FEW) + start + tl.cumsum(wanted.to(tl.int32), axis=0) - 1
        keys = sortable_key(orders, first + block * BLOCK + tl.arange(0, BLOCK))
        tl.store(candidates_ptr + place, keys, mask=wanted)
        start += tl.sum(wanted.to(tl.int32), axis=0)
