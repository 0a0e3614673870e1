# ruff: noqa: ANN001, ANN201, ANN202 (values inside a kernel have no Python types)
# pyright: reportOperatorIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
"""What the split kernel of :mod:`frspec_kernels.tree_attention` reads: keys, values, mask bits."""

import triton
import triton.language as tl

from frspec_kernels.split_merge import LOG2_E


@triton.jit
def load_rows(ptr, rows, stride_row, offs_d, mask_n, D: tl.constexpr, MASK_N: tl.constexpr):
    """``[BLOCK_N, BLOCK_D]`` rows of a cache; no mask where none is needed."""
    ptrs = ptr + rows.to(tl.int64)[:, None] * stride_row + offs_d[None, :]
    if offs_d.shape[0] != D:
        if MASK_N:
            return tl.load(ptrs, mask=mask_n[:, None] & (offs_d < D)[None, :], other=0.0)
        return tl.load(ptrs, mask=(offs_d < D)[None, :], other=0.0)
    if MASK_N:
        return tl.load(ptrs, mask=mask_n[:, None], other=0.0)
    return tl.load(ptrs)


@triton.jit
def load_either(
    in_tree, tree_ptr, cache_ptr, rows, stride_tree, stride_cache, offs_d, mask_n,
    D: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """``[BLOCK_N, BLOCK_D]`` rows of the tree's own keys or of the cache, as ``DTYPE``."""
    if tree_ptr.dtype == cache_ptr.dtype:
        ptr = tl.where(in_tree, tree_ptr, cache_ptr)
        stride = tl.where(in_tree, stride_tree, stride_cache)
        return load_rows(ptr, rows, stride, offs_d, mask_n, D, True).to(DTYPE)
    if in_tree:
        values = load_rows(tree_ptr, rows, stride_tree, offs_d, mask_n, D, True).to(DTYPE)
    else:
        values = load_rows(cache_ptr, rows, stride_cache, offs_d, mask_n, D, True).to(DTYPE)
    return values


@triton.jit
def in_registers(values):
    """The same 16-bit values, which the compiler copies to shared memory where they are used next.

    It copies what comes straight from a load at once, and waits for it before the next load. Rows
    of more than 128 values are left so: they would spill.
    """
    if values.shape[1] > 128:
        return values
    return values.to(tl.int16, bitcast=True).to(values.dtype, bitcast=True)


@triton.jit
def page_slots(indices_ptr, offs, mask_n, PAGE_SIZE: tl.constexpr):
    """Cache slots of the tokens ``offs`` of one request."""
    if PAGE_SIZE == 1:
        return tl.load(indices_ptr + offs, mask=mask_n, other=0)
    page = tl.load(indices_ptr + offs // PAGE_SIZE, mask=mask_n, other=0)
    return page * PAGE_SIZE + offs % PAGE_SIZE


@triton.jit
def capped(scores, scale, cap, CAP: tl.constexpr):
    """Scores and the factor that makes base-2 logits of them; soft-capped when CAP."""
    if CAP:
        x = scores * (scale / cap)
        return (2.0 * tl.sigmoid(2.0 * x) - 1.0) * cap, LOG2_E
    return scores, scale * LOG2_E


@triton.jit
def _or(a, b):
    return a | b


@triton.jit
def tree_visible(
    mask_row_ptr,  # [BLOCK_M] row starts
    mask_m,
    start,
    words,
    BLOCK_N: tl.constexpr,
):
    """Of the keys ``start .. start + BLOCK_N``: bits ``[BLOCK_M, BLOCK_N]``, those of any row."""
    offs_n = tl.arange(0, BLOCK_N)
    columns = tl.arange(0, BLOCK_N // 32)[None, :]
    index = start // 32 + columns
    # One load a word. The sums below only pick; loading each column by itself would make the
    # compiler repeat the loads for every element of the result.
    tile = tl.load(mask_row_ptr[:, None] + index, mask=mask_m[:, None] & (index < words), other=0)
    any_row = tl.reduce(tile, 0, _or)[None, :]
    bits = tl.zeros([mask_row_ptr.shape[0], BLOCK_N], tl.int32)
    any_bits = tl.zeros([BLOCK_N], tl.int32)
    for i in tl.static_range(BLOCK_N // 32):
        word = tl.sum(tl.where(columns == i, tile, 0), axis=1)
        bits = tl.where((offs_n // 32 == i)[None, :], word[:, None], bits)
        any_bits = tl.where(
            offs_n // 32 == i, tl.sum(tl.where(columns == i, any_row, 0), axis=1), any_bits
        )
    shift = offs_n % 32
    return ((bits >> shift[None, :]) & 1) == 1, ((any_bits >> shift) & 1) == 1
