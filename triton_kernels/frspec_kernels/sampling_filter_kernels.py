# ruff: noqa: ANN001, ANN201 (values inside a kernel have no Python types)
# pyright: reportOperatorIssue=false, reportAttributeAccessIssue=false
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
"""Softmax and truncation of target rows without a sort; see :mod:`frspec_kernels.sampling`.

A kept set is everything from one sortable key on: top-k, top-p and min-p each keep the largest
logits, the smaller id among equals, so all that a row needs is a pivot key and the kept mass.

Rows are worked on in slots: with ``current`` slot b has the row of request b's current node, or
nothing when that is -1; without it slot and row are the same.
"""

import triton
import triton.language as tl

from .pdl import wait_for_previous
from .primitives import (
    HIGHEST_KEY,
    LOWEST_KEY,
    LOWEST_ORDER,
    key_score,
    order_score,
    score_order,
    sortable_key,
)

LOG2_E = tl.constexpr(1.4426950408889634)
# Weights are summed as integers of this unit: no order of the candidates changes the sum.
MASS_UNIT = tl.constexpr(1099511627776.0)  # 2**40
PIVOTS = tl.constexpr(8)  # tried in one pass over the candidates
TOGETHER = tl.constexpr(2)  # blocks of candidates asked for at once
# Below this the reciprocal overflows; the row is greedy.
LEAST_TEMPERATURE = tl.constexpr(1.1754943508222875e-38)


@triton.jit
def row_of_slot(current_ptr, slot, N: tl.constexpr):
    """Row, request and node of a slot; the node is -1 when the request is done."""
    if current_ptr is None:
        request, node = slot // N, slot % N
    else:
        request, node = slot, tl.load(current_ptr + slot).to(tl.int64)
    return request * N + node, request, node


@triton.jit
def base_two_slope(temperatures_ptr, request):
    """log2(e) / temperature, or 0 for a greedy request."""
    temperature = tl.load(temperatures_ptr + request)
    usable = temperature >= LEAST_TEMPERATURE
    return tl.where(usable, LOG2_E / tl.where(usable, temperature, 1.0), 0.0)


@triton.jit
def load_orders(logits_ptr, row, stride, ids, V):
    """Logits, NaN as minus infinity, and their :func:`score_order`; past V below all."""
    inside = ids < V
    logits = tl.load(logits_ptr + row * stride + ids, mask=inside, other=float("-inf"))
    logits = logits.to(tl.float32)
    logits = tl.where(logits == logits, logits, float("-inf"))
    return logits, tl.where(inside, score_order(logits), LOWEST_ORDER)


@triton.jit
def softmax_state(best_keys_ptr, sums_ptr, slot, slope, P: tl.constexpr, BLOCK_P: tl.constexpr):
    """Best key of a row, its logit m, and the sum of exp((x - m) / T)."""
    part = tl.arange(0, BLOCK_P)
    at = slot * P + part
    keys = tl.load(best_keys_ptr + at, mask=part < P, other=LOWEST_KEY)
    best_key = tl.max(keys, axis=0)
    maximum = key_score(best_key)
    sums = tl.load(sums_ptr + at, mask=part < P, other=0.0)
    scales = tl.exp2((key_score(keys) - maximum) * slope)
    # Parts of minus infinities count nothing; where all are, the row is greedy.
    return best_key, maximum, tl.sum(tl.where(sums > 0, sums * scales, 0.0), axis=0)


@triton.jit
def is_greedy_row(maximum, slope, top_k):
    """All probability on the best key: greedy requests, and rows without a finite maximum."""
    infinite = (maximum == float("inf")) | (maximum == float("-inf"))
    return (slope == 0.0) | (top_k == 1) | infinite


@triton.jit
def softmax_parts_kernel(
    logits_ptr,  # [B * N, V]
    current_ptr,  # [B] int32 or None
    temperatures_ptr,  # [B] float32
    best_keys_ptr,  # [slots, P] int64
    sums_ptr,  # [slots, P] float32
    group_orders_ptr,  # [slots, P * GROUPS] int32
    V,
    stride_logits,
    N: tl.constexpr,
    P: tl.constexpr,
    SLICE: tl.constexpr,
    GROUPS: tl.constexpr,
    TRUNCATES: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """Program (slot, p): best key and softmax sum of slice p, and the best of each group of it."""
    slot, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    wait_for_previous(USE_PDL)
    row, request, node = row_of_slot(current_ptr, slot, N)
    if node < 0:
        return
    slope = base_two_slope(temperatures_ptr, request)
    ids = part * SLICE + tl.arange(0, SLICE)
    logits, orders = load_orders(logits_ptr, row, stride_logits, ids, V)
    best = tl.max(orders, axis=0)
    best_id = tl.min(tl.where(orders == best, ids, 0x7FFFFFFF), axis=0)
    maximum = order_score(best)
    shift = tl.where((maximum == float("-inf")) | (maximum == float("inf")), 0.0, maximum)
    weights = tl.where(logits == float("-inf"), 0.0, tl.exp2((logits - shift) * slope))
    tl.store(best_keys_ptr + slot * P + part, sortable_key(best, best_id))
    tl.store(sums_ptr + slot * P + part, tl.sum(weights, axis=0))
    if TRUNCATES:
        groups = tl.max(tl.reshape(orders, [GROUPS, SLICE // GROUPS]), axis=1)
        group = tl.arange(0, GROUPS)
        tl.store(group_orders_ptr + (slot * P + part) * GROUPS + group, groups)


@triton.jit
def candidate_bound_kernel(
    current_ptr,  # [B] int32 or None
    temperatures_ptr,  # [B] float32
    top_ks_ptr,  # [B] int32
    top_ps_ptr,  # [B] float32
    min_ps_ptr,  # [B] float32
    best_keys_ptr,  # [slots, P] int64
    sums_ptr,  # [slots, P] float32
    group_orders_ptr,  # [slots, P * GROUPS] int32
    bounds_ptr,  # [slots] int64
    counts_ptr,  # [slots] int32
    V,
    N: tl.constexpr,
    P: tl.constexpr,
    BLOCK_P: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK_G: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """Program slot: a key that no kept token is below, and an empty list of candidates.

    Tokens of probability below (1 - top_p) / V hold less than 1 - top_p together, so top-p never
    reaches them. The k-th largest of the groups' maxima is at most the k-th largest logit.
    """
    slot = tl.program_id(0).to(tl.int64)
    wait_for_previous(USE_PDL)
    _row, request, node = row_of_slot(current_ptr, slot, N)
    if node < 0:
        return
    slope = base_two_slope(temperatures_ptr, request)
    top_k = tl.load(top_ks_ptr + request)
    top_p = tl.load(top_ps_ptr + request)
    min_p = tl.load(min_ps_ptr + request)
    best_key, maximum, total = softmax_state(best_keys_ptr, sums_ptr, slot, slope, P, BLOCK_P)
    bound = tl.zeros([], tl.int64) + LOWEST_KEY
    if is_greedy_row(maximum, slope, top_k):
        bound = best_key
    elif (top_k > 1) & (top_k < V):
        if top_k <= P * GROUPS:
            group = tl.arange(0, BLOCK_G)
            at = group_orders_ptr + slot * (P * GROUPS) + group
            orders = tl.load(at, mask=group < P * GROUPS, other=LOWEST_ORDER)
            low = tl.zeros([], tl.int64) + LOWEST_ORDER
            high = (best_key >> 32) + 1
            for _ in range(20):  # of 2**32 orders, 4096 stay undecided: a few more candidates
                middle = (low + high) >> 1
                enough = tl.sum((orders >= middle).to(tl.int32), axis=0) >= top_k
                low = tl.where(enough, middle, low)
                high = tl.where(enough, high, middle)
            bound = low << 32
    elif (top_p < 1.0) | (min_p > 0.0):
        # A little lower than exact: the candidates' own sums decide.
        least = tl.maximum(total * (1.0 - top_p) / V, min_p) * 0.999
        score = maximum + tl.log2(tl.minimum(least, 1.0)) / slope
        bound = score_order(score).to(tl.int64) << 32
    else:
        bound = tl.zeros([], tl.int64) + HIGHEST_KEY  # nothing is cut: no candidates are needed
    tl.store(bounds_ptr + slot, bound)
    tl.store(counts_ptr + slot, 0)


@triton.jit
def collect_candidates_kernel(
    logits_ptr,  # [B * N, V]
    current_ptr,  # [B] int32 or None
    bounds_ptr,  # [slots] int64
    counts_ptr,  # [slots] int32
    candidates_ptr,  # [slots, V] int64
    V,
    stride_logits,
    N: tl.constexpr,
    SLICE: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """Program (slot, p): the keys of slice p that are not below the bound, into the slot's list."""
    slot, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    wait_for_previous(USE_PDL)
    row, _request, node = row_of_slot(current_ptr, slot, N)
    if node < 0:
        return
    bound = tl.load(bounds_ptr + slot)
    if bound == HIGHEST_KEY:
        return
    ids = part * SLICE + tl.arange(0, SLICE)
    _, orders = load_orders(logits_ptr, row, stride_logits, ids, V)
    keys = sortable_key(orders, ids)
    wanted = (keys >= bound) & (ids < V)
    count = tl.sum(wanted.to(tl.int32), axis=0)
    if count == 0:
        return
    first = tl.atomic_add(counts_ptr + slot, count)
    place = first + tl.cumsum(wanted.to(tl.int32), axis=0) - 1
    tl.store(candidates_ptr + slot * V + place, keys, mask=wanted)


@triton.jit
def amounts_from(
    candidates_ptr, count, low, step, maximum, slope, WEIGHTED: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """[PIVOTS] int64 twice: how many candidates there are from low + j * step on, their weight.

    Each thread sums for itself, and the threads' sums are added once, at the end.
    """
    pivots = low + tl.arange(0, PIVOTS).to(tl.int64) * step
    numbers = tl.zeros([BLOCK, PIVOTS], tl.int32)
    masses = tl.zeros([BLOCK, PIVOTS], tl.int64)
    for start in range(0, count, BLOCK * TOGETHER):
        for block in tl.static_range(TOGETHER):
            place = start + block * BLOCK + tl.arange(0, BLOCK)
            keys = tl.load(candidates_ptr + place, mask=place < count, other=LOWEST_KEY)
            above = (keys[:, None] >= pivots[None, :]) & (place < count)[:, None]
            numbers += above.to(tl.int32)
            if WEIGHTED:
                weights = tl.exp2((key_score(keys) - maximum) * slope) * MASS_UNIT
                weights = tl.where(place < count, weights, 0.0).to(tl.int64)
                masses += tl.where(above, weights[:, None], 0)
    return tl.sum(numbers, axis=0).to(tl.int64), tl.sum(masses, axis=0)


@triton.jit
def keep_between(candidates_ptr, count, low, high, BLOCK: tl.constexpr):
    """Bring the keys from ``low`` up to below ``high`` to the front of the list; their number."""
    kept = count * 0
    for start in range(0, count, BLOCK):
        place = start + tl.arange(0, BLOCK)
        keys = tl.load(candidates_ptr + place, mask=place < count, other=LOWEST_KEY)
        wanted = (keys >= low) & (keys < high) & (place < count)
        # The scan waits for every thread's key, and no place is behind those that were read.
        target = kept + tl.cumsum(wanted.to(tl.int32), axis=0) - 1
        tl.store(candidates_ptr + target, keys, mask=wanted)
        kept += tl.sum(wanted.to(tl.int32), axis=0)
    tl.debug_barrier()  # other threads read them
    return kept


@triton.jit
def find_pivot(
    candidates_ptr, count, low, best_key, wanted, maximum, slope, WEIGHTED: tl.constexpr,
    SHRINK_FROM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The largest key with at least ``wanted`` (a number, or weight) from it on; else ``low``.

    All keys above one candidate up to the next are as good; the first found is returned, and the
    weight from it on, or -1 where no pass was needed. With weights, a list longer than
    ``SHRINK_FROM`` loses the keys that are decided, once most of them are.
    """
    high = best_key + 1
    j = tl.arange(0, PIVOTS)
    zero = tl.zeros([], tl.int64)
    number_above, mass_above, mass_low = zero, zero, zero - 1
    while high - 1 > low:
        # Each divided first: their difference may need 65 bits.
        step = tl.maximum(high // PIVOTS - low // PIVOTS, 1)
        numbers, masses = amounts_from(
            candidates_ptr, count, low, step, maximum, slope, WEIGHTED, BLOCK
        )  # fmt: skip
        numbers, masses = numbers + number_above, masses + mass_above
        enough = (masses if WEIGHTED else numbers) >= wanted
        last = tl.maximum(tl.sum(enough.to(tl.int32), axis=0) - 1, 0)
        low += last.to(tl.int64) * step
        mass_low = tl.sum(tl.where(j == last, masses, 0), axis=0)
        if last < PIVOTS - 1:
            number_next = tl.sum(tl.where(j == last + 1, numbers, 0), axis=0)
            between = tl.sum(tl.where(j == last, numbers, 0), axis=0) - number_next
            high = tl.minimum(high, low + step)
            if WEIGHTED:  # noqa: SIM102 (decided at compile time)
                if (count > SHRINK_FROM) & (between * 4 < count):
                    count = keep_between(candidates_ptr, count, low, high, BLOCK)
                    number_above = number_next
                    mass_above = tl.sum(tl.where(j == last + 1, masses, 0), axis=0)
            # One candidate between the two: both bounds keep the same set.
            high = tl.where(between <= 1, low + 1, high)
    return low, mass_low


@triton.jit
def mass_from(candidates_ptr, count, pivot, maximum, slope, BLOCK: tl.constexpr):
    """Weight of the candidates from ``pivot`` on."""
    one = tl.zeros([], tl.int64) + 1
    _, masses = amounts_from(candidates_ptr, count, pivot, one, maximum, slope, True, BLOCK)
    return tl.sum(tl.where(tl.arange(0, PIVOTS) == 0, masses, 0), axis=0)


@triton.jit
def kept_set(
    candidates_ptr, count, bound, best_key, maximum, total, slope, top_k, top_p, min_p, V,
    SHRINK_FROM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Smallest kept key, and the sum of exp((x - m) / T) over the kept tokens.

    ``candidates_ptr`` is the row's list: ``count`` keys from ``bound`` on, all that may be kept.
    It may be shorter afterwards.
    """
    pivot = bound
    mass = (total * MASS_UNIT).to(tl.int64)
    kept = tl.zeros([], tl.int64) - 1
    least, mass_least = pivot, kept
    if (top_k > 1) & (top_k < V):
        pivot, _ = find_pivot(
            candidates_ptr, count, pivot, best_key, top_k.to(tl.int64), maximum, slope, False,
            SHRINK_FROM, BLOCK,
        )  # fmt: skip
        mass = mass_from(candidates_ptr, count, pivot, maximum, slope, BLOCK)
        kept = mass
    if min_p > 0.0:
        score = maximum + tl.log2(tl.minimum(min_p, 1.0)) / slope
        least = tl.minimum(score_order(score).to(tl.int64) << 32, best_key)
        mass_least = mass_from(candidates_ptr, count, least, maximum, slope, BLOCK)
    if top_p < 1.0:
        wanted = tl.maximum((mass.to(tl.float32) * top_p).to(tl.int64), 1)
        pivot, found = find_pivot(
            candidates_ptr, count, pivot, best_key, wanted, maximum, slope, True, SHRINK_FROM,
            BLOCK,
        )  # fmt: skip
        kept = tl.where(found >= 0, found, kept)
    if kept < 0:
        kept = mass_from(candidates_ptr, count, pivot, maximum, slope, BLOCK)
    kept = tl.where(least > pivot, mass_least, kept)
    return tl.maximum(pivot, least), kept.to(tl.float32) / MASS_UNIT
