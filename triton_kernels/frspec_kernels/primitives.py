# ruff: noqa: ANN001, ANN201 (values inside a kernel have no Python types)
# pyright: reportOperatorIssue=false
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


@triton.jit
def sortable_key(scores, token_ids):
    """int64 keys of float32 ``scores``; ``token_ids`` in [0, 2**32)."""
    scores = tl.where(scores == 0.0, 0.0, scores)
    bits = scores.to(tl.int32, bitcast=True)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    ordered = tl.where(scores != scores, 0x7FFFFFFF, ordered)
    return (ordered.to(tl.int64) << 32) | (0xFFFFFFFF - token_ids.to(tl.int64))


@triton.jit
def key_score(keys):
    """The float32 scores of ``keys``."""
    ordered = (keys >> 32).to(tl.int32)
    return (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def key_token_id(keys):
    """The int64 token ids of ``keys``."""
    return 0xFFFFFFFF - (keys & 0xFFFFFFFF)


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
def extract_best(keys, K: tl.constexpr, K_PAD: tl.constexpr):
    """[K_PAD] the K largest of the distinct ``keys`` [N] in descending order.

    A slot without a key is below every key, and no two of those are equal; slots from K on are
    ``HIGHEST_KEY``, which no insertion replaces.
    """
    slot = tl.arange(0, K_PAD)
    best = tl.where(slot < K, LOWEST_KEY + 1 + slot.to(tl.int64), HIGHEST_KEY)
    for rank in range(K):
        top = tl.max(keys, axis=0)
        best = tl.where((slot == rank) & (top > LOWEST_KEY), top, best)
        keys = tl.where(keys == top, LOWEST_KEY, keys)
    return best


@triton.jit
def insert_best(best, keys):
    """The K largest of ``best`` (from :func:`extract_best`) and the distinct ``keys``, unordered.

    A round moves one key; the rounds stop when no key left beats the worst of the best.
    """
    worst = tl.min(best, axis=0)
    top = tl.max(keys, axis=0)
    while top > worst:
        best = tl.where(best == worst, top, best)
        keys = tl.where(keys == top, LOWEST_KEY, keys)
        worst = tl.min(best, axis=0)
        top = tl.max(keys, axis=0)
    return best


@triton.jit
def descending_rank(keys):
    """[N] position of each of the distinct ``keys`` [N] in descending order."""
    return tl.sum((keys[None, :] > keys[:, None]).to(tl.int32), axis=1)
