# ruff: noqa: ANN001, ANN201 (values inside a kernel have no Python types)
# pyright: reportOperatorIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
# pyright: reportPossiblyUnboundVariable=false
"""The loop of :mod:`frspec_kernels.tree_attention` over context tiles that need no mask."""

import triton
import triton.language as tl

from frspec_kernels.split_merge import softmax_weights
from frspec_kernels.tree_attention_loads import capped, load_rows, page_slots


@triton.jit
def whole_tiles(
    acc,  # [BLOCK_M, BLOCK_DV] float32
    m_i,  # [BLOCK_M] float32
    l_i,  # [BLOCK_M] float32
    q,  # [BLOCK_M, BLOCK_D]
    k_head_ptr,  # [slots, D]
    v_head_ptr,  # [slots, DV]
    indices_ptr,
    lo,
    hi,
    length,
    depth,  # [BLOCK_M]
    scale,
    logit_cap,
    stride_k_slot,
    stride_v_slot,
    D: tl.constexpr,
    DV: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    WINDOW_LEFT: tl.constexpr,
    HAS_CAP: tl.constexpr,
    PREFETCH: tl.constexpr,
    KEYS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):
    """The softmax state after the context's keys ``lo .. hi``, KEYS at a time, none masked."""
    offs_k = tl.arange(0, KEYS)
    offs_d = tl.arange(0, BLOCK_D)
    offs_dv = tl.arange(0, BLOCK_DV)
    all_k = offs_k < KEYS
    slots = page_slots(indices_ptr, lo + offs_k, lo + offs_k < hi, PAGE_SIZE)
    for start in range(lo, hi, KEYS):
        if PREFETCH:
            ahead = start + KEYS + offs_k
            next_slots = page_slots(indices_ptr, ahead, ahead < hi, PAGE_SIZE)
        else:
            slots = page_slots(indices_ptr, start + offs_k, all_k, PAGE_SIZE)
        k = load_rows(k_head_ptr, slots, stride_k_slot, offs_d, all_k, D, False)
        scores, factor = capped(tl.dot(q, tl.trans(k.to(q.dtype))), scale, logit_cap, HAS_CAP)
        if WINDOW_LEFT >= 0:
            distance = length - start - offs_k[None, :] + depth[:, None]
            scores = tl.where(distance <= WINDOW_LEFT, scores, float("-inf"))
        weights, alpha, m_i, l_i = softmax_weights(scores, factor, m_i, l_i, WINDOW_LEFT >= 0)
        v = load_rows(v_head_ptr, slots, stride_v_slot, offs_dv, all_k, DV, False)
        acc = tl.dot(weights.to(q.dtype), v.to(q.dtype), acc * alpha[:, None])
        if PREFETCH:
            slots = next_slots
    return acc, m_i, l_i
