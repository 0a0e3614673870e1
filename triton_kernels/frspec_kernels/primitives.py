# ruff: noqa: ANN001, ANN201 (values inside a kernel have no Python types)
# pyright: reportOperatorIssue=false, reportAttributeAccessIssue=false
"""Shared ``@triton.jit`` pieces: scores that sort with their token ids, and packed softmax states.

A **sortable key** is one int64: the score's bits, made monotone, above the inverted token id. A
single integer compare then orders by score and, between equal scores, puts the smaller token id
first. -0 counts as +0 and every NaN as the largest score, as in ``torch.topk``.

A **softmax state** is (maximum m, sum of exp(x - m)) of some scores, packed into one int64 so that
it travels with the keys.
"""

import triton
import triton.language as tl

# Below the key of every score, -inf included.
LOWEST_KEY = tl.constexpr(-(2**63))
HIGHEST_KEY = tl.constexpr(2**63 - 1)
LOWEST_ORDER = tl.constexpr(-(2**31))
HIGHEST_ORDER = tl.constexpr(2**31 - 1)  # of NaN alone
MAX_TOKEN_ID = tl.constexpr(2**31 - 1)


@triton.jit
def score_order(scores):
    """int32 that compare as the float32 ``scores`` do."""
    scores = tl.where(scores == 0.0, 0.0, scores)
    bits = scores.to(tl.int32, bitcast=True)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return tl.where(scores != scores, 0x7FFFFFFF, ordered)


@triton.jit
def order_score(order):
    """The float32 score of a :func:`score_order`."""
    return (order ^ ((order >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def sortable_key(order, token_ids):
    """int64 keys of ``order``, from :func:`score_order`; ``token_ids`` in [0, 2**31)."""
    return (order.to(tl.int64) << 32) | (token_ids.to(tl.int64) ^ MAX_TOKEN_ID)


@triton.jit
def key_score(keys):
    """The float32 scores of ``keys``."""
    return order_score((keys >> 32).to(tl.int32))


@triton.jit
def key_token_id(keys):
    """The int64 token ids of ``keys``."""
    return (keys & 0xFFFFFFFF) ^ MAX_TOKEN_ID


@triton.jit
def pack_softmax_state(maximum, total):
    """Two float32 in one int64."""
    high = maximum.to(tl.int32, bitcast=True).to(tl.int64) << 32
    return high | (total.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF)


@triton.jit
def unpack_softmax_state(state):
    """Maximum and sum of a packed state."""
    maximum = (state >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    return maximum, state.to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def finite_maximum(maximum):
    """What to subtract in exp: 0 where there is nothing but -inf, so that the sum is 0, not NaN."""
    return tl.where(maximum == float("-inf"), 0.0, maximum)


@triton.jit
def extract_best(keys, rounds, K: tl.constexpr, K_PAD: tl.constexpr):
    """The K largest of the distinct ``keys`` [N] in descending order, and their places in [0, N).

    Both [K_PAD]; also the :func:`score_order` of the last. A slot without a key has the place -1
    and is below every key; no two of those are equal. Slots from K on are ``HIGHEST_KEY``, which no
    insertion replaces. ``rounds`` is K: a constant lets the compiler unroll. The halves of a key
    are searched one after the other: a warp has an instruction for the maximum of 32-bit integers.
    """
    slot = tl.arange(0, K_PAD)
    offs = tl.arange(0, keys.shape[0])
    best = tl.where(slot < K, slot.to(tl.int64) + (LOWEST_KEY + 1), HIGHEST_KEY)
    places = tl.full([K_PAD], -1, tl.int32)
    high, low = (keys >> 32).to(tl.int32), keys.to(tl.int32)
    top_high = tl.max(high, axis=0)
    for rank in range(rounds):
        top_high = tl.max(high, axis=0)
        top_low = tl.max(tl.where(high == top_high, low, -1), axis=0)
        taken = (high == top_high) & (low == top_low)
        place = tl.max(tl.where(taken, offs, -1), axis=0)
        high = tl.where(taken, LOWEST_ORDER, high)
        filled = (slot == rank) & (top_high > LOWEST_ORDER)
        top = (top_high.to(tl.int64) << 32) | top_low.to(tl.int64)
        best = tl.where(filled, top, best)
        places = tl.where(filled, place, places)
    return best, places, top_high


@triton.jit
def descending_rank(keys):
    """[N] position of each of the distinct ``keys`` [N] in descending order."""
    return tl.sum((keys[None, :] > keys[:, None]).to(tl.int32), axis=1)
