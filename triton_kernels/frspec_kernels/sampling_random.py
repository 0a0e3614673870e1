# ruff: noqa: ANN001, ANN201 (values inside a kernel have no Python types)
# pyright: reportOperatorIssue=false, reportAttributeAccessIssue=false
"""Counter-based random numbers inside kernels: Philox-4x32-10 keyed by a request's seed.

A number is named by (lane, root position, purpose and depth, branch), see ``docs/sampling.md``, so
it does not depend on the batch, the launch or the split of the vocabulary. The four words of a
Philox block go to four consecutive token ids. :mod:`frspec_kernels.sampling_random_reference` is
the same in PyTorch.

An exponential number is -log(1 - v) with v = (r + 1/2) / 2**32: near 0, where the smallest of
100,000 of them lies, it keeps the 32 bits of r, which -log(v) would round to multiples of 6e-8.
"""

import triton
import triton.language as tl
from triton.language.random import philox_impl

DRAW = tl.constexpr(0)
ACCEPT = tl.constexpr(1)
RESIDUAL = tl.constexpr(2)
WORD = tl.constexpr(2.3283064365386963e-10)  # 2**-32


@triton.jit
def random_words(seed, lane, position, purpose, depth, branch):
    """Four blocks of uint32, in the shape of ``lane``; ``seed`` is int64, the others integers."""
    zero = lane * 0  # int32
    key_low = (seed & 0xFFFFFFFF).to(tl.uint32)
    key_high = ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32)
    root = (position & 0xFFFFFFFF).to(tl.uint32)
    return philox_impl(
        lane.to(tl.uint32),
        zero.to(tl.uint32) + root,
        (zero + depth * 4 + purpose).to(tl.uint32),
        (zero + branch).to(tl.uint32),
        key_low,
        key_high,
    )


@triton.jit
def random_words_of_ids(
    seed, first_id, position, purpose, depth, branch, SIZE: tl.constexpr
):  # fmt: skip
    """[SIZE] uint32 of the token ids from ``first_id`` on, a multiple of 4."""
    lane = first_id // 4 + tl.arange(0, SIZE // 4)
    a, b, c, d = random_words(seed, lane, position, purpose, depth, branch)
    return tl.interleave(tl.interleave(a, c), tl.interleave(b, d))


@triton.jit
def uniform(words):
    """float32 in [0, 1), multiples of 2**-24."""
    return (words >> 8).to(tl.int32).to(tl.float32) * 5.9604644775390625e-08


@triton.jit
def exponential(words):
    """float32 > 0 with the standard exponential distribution."""
    # Through int64: not every target converts uint32 to float32 as unsigned.
    v = (words.to(tl.int64).to(tl.float32) + 0.5) * WORD
    series = v * (1.0 + v * (0.5 + v * (0.33333334 + v * 0.25)))
    # The largest words round to v = 1; what is left of 1 there is half a step of theirs.
    return tl.where(v < 0.015625, series, -tl.log(tl.maximum(1.0 - v, 2.9802322387695312e-08)))
