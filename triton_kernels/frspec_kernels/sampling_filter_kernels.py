# ruff: noqa: ANN001, ANN201 (values inside a kernel have no Python types)
# pyright: reportOperatorIssue=false, reportAttributeAccessIssue=false
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
"""Softmax of target rows, part by part; see :mod:`frspec_kernels.sampling`.

Rows are worked on in slots: with ``current`` slot b has the row of request b's current node, or
nothing when that is -1; without it slot and row are the same.
"""

import triton
import triton.language as tl

from .pdl import wait_for_previous
from .primitives import (
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
# Below this the reciprocal overflows; the row is greedy.
LEAST_TEMPERATURE = tl.constexpr(1.1754943508222875e-38)
LEAST_SCORE = tl.constexpr(-3.4028234663852886e38)
LEAST_SLOPE = tl.constexpr(1.1754943508222875e-38)  # a normal float32


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
    """log2(e) / temperature, or 0 for a greedy request.

    Never 0 for another: an infinite temperature levels what is finite, and is not greedy.
    """
    temperature = tl.load(temperatures_ptr + request)
    usable = temperature >= LEAST_TEMPERATURE
    slope = tl.maximum(LOG2_E / tl.where(usable, temperature, 1.0), LEAST_SLOPE)
    return tl.where(usable, slope, 0.0)


@triton.jit
def orders_of(logits):
    """Logits as float32, NaN as minus infinity, and their :func:`score_order`."""
    logits = logits.to(tl.float32)
    logits = tl.where(logits == logits, logits, float("-inf"))
    return logits, score_order(logits)


@triton.jit
def load_orders(logits_ptr, row, stride, ids, V):
    """Logits, NaN as minus infinity, and their :func:`score_order`; past V below all."""
    inside = ids < V
    logits = tl.load(logits_ptr + row * stride + ids, mask=inside, other=float("-inf"))
    logits, orders = orders_of(logits)
    return logits, tl.where(inside, orders, LOWEST_ORDER)


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
def share_order(maximum, slope, share):
    """Order of the least score whose weight reaches ``share`` of the best one's, finite at least.

    The score is rounded, by half a percent of the weight where logits are 1e5. Rounded down, it is
    that of a token below the share.
    """
    exponent = tl.log2(tl.minimum(share, 1.0))
    score = tl.maximum(maximum + exponent / slope, LEAST_SCORE)
    # What log2, the quotient and the product round must not push up a token that has the share.
    below = (score - maximum) * slope < exponent - tl.maximum(-exponent, 1.0) * 1e-6
    return score_order(score) + below.to(tl.int32)


@triton.jit
def is_greedy_row(maximum, slope, top_k):
    """All probability on the best key: greedy requests, and rows without a finite maximum."""
    infinite = (maximum == float("inf")) | (maximum == float("-inf"))
    return (slope == 0.0) | (top_k == 1) | infinite


@triton.jit
def is_cut(top_k, top_p, min_p, V):
    """Whether top-k cuts a row, and whether anything does."""
    by_top_k = (top_k > 1) & (top_k < V)
    return by_top_k, by_top_k | (top_p < 1.0) | (min_p > 0.0)


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
