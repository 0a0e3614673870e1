# ruff: noqa: ANN001, ANN201 (values inside a kernel have no Python types)
# pyright: reportOperatorIssue=false, reportAttributeAccessIssue=false
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
"""The smallest kept key of a row, among its candidates; see :mod:`frspec_kernels.sampling`.

A kept set is everything from one sortable key on: top-k, top-p and min-p each keep the largest
logits, the smaller id among equals, so all that a row needs is a pivot key and the kept mass.

Bisection is over **dense keys**, a score's order above V's bits of the inverted id: a sortable key
has 31 bits for an id, of which most are the same in every key.
"""

import triton
import triton.language as tl

from .primitives import LOWEST_KEY, MAX_TOKEN_ID, key_score
from .sampling_filter_kernels import MASS_UNIT, share_order

PIVOTS = tl.constexpr(8)  # tried in one pass over the candidates
WIDE = tl.constexpr(4)  # blocks in one step of a pass without pivots
TOGETHER = tl.constexpr(2)  # blocks of candidates asked for at once
CHUNK = tl.constexpr(16)  # candidates that all few are compared with at once


@triton.jit
def dense_key(key, ID_BITS: tl.constexpr):
    """Sortable keys without the bits that every id has."""
    mask: tl.constexpr = (1 << ID_BITS) - 1
    return ((key >> 32) << ID_BITS) | (key & mask)


@triton.jit
def sparse_key(dense, ID_BITS: tl.constexpr):
    """The sortable key of a :func:`dense_key`."""
    mask: tl.constexpr = (1 << ID_BITS) - 1
    return ((dense >> ID_BITS) << 32) | (dense & mask) | (MAX_TOKEN_ID - mask)


@triton.jit
def mass_of(keys, maximum, slope):
    """exp((x - m) / T) as integers."""
    return (tl.exp2((key_score(keys) - maximum) * slope) * MASS_UNIT).to(tl.int64)


@triton.jit
def amounts_from(
    candidates_ptr, count, pivots, maximum, slope, WEIGHTED: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """[PIVOTS] int64 twice: how many candidates there are from each pivot on, and their weight.

    Each thread sums for itself, and the threads' sums are added once, at the end.
    """
    numbers = tl.zeros([PIVOTS, BLOCK], tl.int32)
    masses = tl.zeros([PIVOTS, BLOCK], tl.int64)
    for start in range(0, count, BLOCK * TOGETHER):
        for block in tl.static_range(TOGETHER):
            place = start + block * BLOCK + tl.arange(0, BLOCK)
            keys = tl.load(candidates_ptr + place, mask=place < count, other=LOWEST_KEY)
            above = (keys[None, :] >= pivots[:, None]) & (place < count)[None, :]
            numbers += above.to(tl.int32)
            if WEIGHTED:
                weights = tl.where(place < count, mass_of(keys, maximum, slope), 0)
                masses += tl.where(above, weights[None, :], 0)
    return tl.sum(numbers, axis=1).to(tl.int64), tl.sum(masses, axis=1)


@triton.jit
def keep_between(candidates_ptr, target_ptr, count, low, high, BLOCK: tl.constexpr):
    """The keys from ``low`` up to below ``high``, to ``target``; their number.

    The target is the list itself, or does not overlap it.
    """
    kept = count * 0
    for start in range(0, count, BLOCK * WIDE):
        place = start + tl.arange(0, BLOCK * WIDE)
        keys = tl.load(candidates_ptr + place, mask=place < count, other=LOWEST_KEY)
        wanted = (keys >= low) & (keys < high) & (place < count)
        # The scan waits for every thread's key, and no place is behind those that were read.
        target = kept + tl.cumsum(wanted.to(tl.int32), axis=0) - 1
        tl.store(target_ptr + target, keys, mask=wanted)
        kept += tl.sum(wanted.to(tl.int32), axis=0)
    tl.debug_barrier()  # other threads read them
    return kept


@triton.jit
def pivot_of_few(
    list_ptr, count, wanted, beyond, low, maximum, slope, WEIGHTED: tl.constexpr, FEW: tl.constexpr
):  # fmt: skip
    """As :func:`find_pivot`, of at most FEW keys: each is compared with all.

    ``beyond`` is the amount above them.
    """
    at = tl.arange(0, FEW)
    keys = tl.load(list_ptr + at, mask=at < count, other=LOWEST_KEY)
    amounts = tl.zeros([FEW], tl.int64) + beyond
    for start in range(0, count, CHUNK):
        place = start + tl.arange(0, CHUNK)
        others = tl.load(list_ptr + place, mask=place < count, other=LOWEST_KEY)
        values = tl.full([CHUNK], 1, tl.int64)
        if WEIGHTED:
            values = mass_of(others, maximum, slope)
        values = tl.where(place < count, values, 0)
        amounts += tl.sum(tl.where(others[:, None] >= keys[None, :], values[:, None], 0), axis=0)
    enough = (amounts >= wanted) & (at < count)
    best = tl.max(tl.where(enough, keys, LOWEST_KEY), axis=0)
    found = best > LOWEST_KEY
    here = tl.max(tl.where(keys == best, amounts, 0), axis=0)
    every = tl.max(tl.where(at < count, amounts, beyond), axis=0)
    return tl.where(found, best, low), tl.where(found, here, every)


@triton.jit
def find_pivot(
    candidates_ptr, few_ptr, count, low, high, wanted, beyond, maximum, slope,
    WEIGHTED: tl.constexpr, ID_BITS: tl.constexpr, SHRINK_FROM: tl.constexpr, FEW: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """The largest candidate with at least ``wanted`` from it on, a number or a weight; how much.

    Without one ``low``, and all there is. ``low`` and ``high`` are dense keys, the list is what
    lies between them, ``beyond`` the amount above. With weights, a list longer than ``SHRINK_FROM``
    loses the keys that are decided, once most of them are. ``few_ptr`` is room for FEW keys.
    """
    j = tl.arange(0, PIVOTS)
    lowest = sparse_key(low, ID_BITS)
    zero = tl.zeros([], tl.int64)
    undecided = count.to(tl.int64)
    # Of the list's own keys from ``high`` on: their number; and the amount that left the list.
    number_high, gone = zero, beyond
    while undecided > FEW:
        step = tl.maximum((high - low) // PIVOTS, 1)
        pivots = sparse_key(low + j.to(tl.int64) * step, ID_BITS)
        numbers, masses = amounts_from(
            candidates_ptr, count, pivots, maximum, slope, WEIGHTED, BLOCK
        )  # fmt: skip
        amounts = (masses if WEIGHTED else numbers) + gone
        last = tl.maximum(tl.sum((amounts >= wanted).to(tl.int32), axis=0) - 1, 0)
        low += last.to(tl.int64) * step
        if last < PIVOTS - 1:
            high = tl.minimum(high, low + step)
            number_high = tl.sum(tl.where(j == last + 1, numbers, 0), axis=0)
            beyond = tl.sum(tl.where(j == last + 1, amounts, 0), axis=0)
        undecided = tl.sum(tl.where(j == last, numbers, 0), axis=0) - number_high
        if WEIGHTED:  # noqa: SIM102 (decided at compile time)
            if (count > SHRINK_FROM) & (undecided * 4 < count):
                count = keep_between(
                    candidates_ptr, candidates_ptr, count, sparse_key(low, ID_BITS),
                    sparse_key(high, ID_BITS), BLOCK,
                )  # fmt: skip
                number_high, gone = zero, beyond
    list_ptr = candidates_ptr
    if count > FEW:
        count = keep_between(
            candidates_ptr, few_ptr, count, sparse_key(low, ID_BITS), sparse_key(high, ID_BITS),
            BLOCK,
        )  # fmt: skip
        list_ptr = few_ptr
    return pivot_of_few(list_ptr, count, wanted, beyond, lowest, maximum, slope, WEIGHTED, FEW)


@triton.jit
def mass_from(candidates_ptr, count, pivot, maximum, slope, BLOCK: tl.constexpr):
    """Weight of the candidates from ``pivot`` on."""
    pivots = pivot + tl.zeros([PIVOTS], tl.int64)
    _, masses = amounts_from(candidates_ptr, count, pivots, maximum, slope, True, BLOCK)
    return tl.max(masses, axis=0)


@triton.jit
def kept_set(
    candidates_ptr, few_ptr, count, low_order, high_order, best_key, maximum, total, above, slope,
    top_k, top_p, min_p, by_top_k, ID_BITS: tl.constexpr, SHRINK_FROM: tl.constexpr,
    FEW: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Smallest kept key, and the sum of exp((x - m) / T) over the kept tokens.

    ``candidates_ptr`` is the row's list: ``count`` keys of the bracket, above which the mass is
    ``above``. It may be shorter afterwards. With a top-k the bracket has everything that may be
    kept; without one min-p is in it already.
    """
    low = low_order.to(tl.int64) << ID_BITS
    high = tl.minimum(high_order.to(tl.int64) << ID_BITS, dense_key(best_key, ID_BITS) + 1)
    pivot, kept = sparse_key(low, ID_BITS), above
    mass = (total * MASS_UNIT).to(tl.int64)
    least, mass_least = pivot, kept
    if by_top_k:
        pivot, _ = find_pivot(
            candidates_ptr, few_ptr, count, low, high, top_k.to(tl.int64), above, maximum, slope,
            False, ID_BITS, SHRINK_FROM, FEW, BLOCK,
        )  # fmt: skip
        low = dense_key(pivot, ID_BITS)
        kept = mass_from(candidates_ptr, count, pivot, maximum, slope, BLOCK)
        mass = kept
        if min_p > 0.0:
            least_order = share_order(maximum, slope, min_p)
            least = tl.minimum(least_order.to(tl.int64) << 32, best_key)
            mass_least = mass_from(candidates_ptr, count, least, maximum, slope, BLOCK)
    if top_p < 1.0:
        # No more than there is: the product is rounded.
        wanted = tl.maximum((mass.to(tl.float32) * top_p).to(tl.int64), 1)
        wanted = tl.where(by_top_k, tl.minimum(wanted, mass), wanted)
        pivot, kept = find_pivot(
            candidates_ptr, few_ptr, count, low, high, wanted, above, maximum, slope, True,
            ID_BITS, SHRINK_FROM, FEW, BLOCK,
        )  # fmt: skip
    kept = tl.where(least > pivot, mass_least, kept)
    return tl.maximum(pivot, least), kept.to(tl.float32) / MASS_UNIT
