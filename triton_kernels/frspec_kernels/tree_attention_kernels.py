# ruff: noqa: ANN001, ANN201 (values inside a kernel have no Python types)
# pyright: reportOperatorIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
# pyright: reportPossiblyUnboundVariable=false
"""Device code of :mod:`frspec_kernels.tree_attention`: one split of a request's keys.

Letters as there; ``P`` parts, ``R`` rows of a request (nodes x query heads of a KV head), ``W``
mask words. A program is (row tile, KV head, split): row tiles and heads of one split run side by
side, so that they share its keys in L2. Whole context tiles need no mask; the tail's tiles, what is
left of the context and the tree, do.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from frspec_kernels.split_merge import (
    LN_2,
    LOG2_E,
    count_tiles,
    normalise,
    pick,
    plan_splits,
    softmax_weights,
    split_tiles,
)
from frspec_kernels.tree_attention_loads import (
    capped,
    in_registers,
    load_either,
    load_rows,
    page_slots,
    tree_visible,
)


@triton.jit(
    do_not_specialize=[
        "batch",
        "num_slots",
        "min_tiles",
        "max_rows",
        "mask_words",
        "stride_mask",
    ]
)
def tree_attention_kernel(
    q_ptr,  # [T, QH, D]
    k_cache_ptr,  # [slots, KVH, D]
    v_cache_ptr,  # [slots, KVH, DV]
    kv_indptr_ptr,  # [B + 1]
    kv_indices_ptr,
    context_lens_ptr,  # [B], read when HAS_LENS
    qo_indptr_ptr,  # [B + 1]
    key_indptr_ptr,  # [B + 1]
    k_tree_ptr,  # [K, KVH, D], or the cache when TREE_IN_CACHE
    v_tree_ptr,
    tree_slots_ptr,  # [K], read when TREE_IN_CACHE
    mask_ptr,  # [T, W] int32
    depths_ptr,  # [T], read when WINDOW_LEFT >= 0
    key_depths_ptr,  # [K]
    sinks_ptr,  # [QH], read when HAS_SINKS
    out_ptr,  # [T, QH, DV]
    lse_ptr,  # [T, QH] float32, written when STORE_LSE
    part_out_ptr,  # [P, KVH, R, DV] float32
    part_lse_ptr,  # [P, KVH, R] float32
    batch,
    num_slots,
    min_tiles,
    max_rows,
    mask_words,
    sm_scale,
    k_scale,
    v_scale,
    logit_cap,
    stride_q_node,
    stride_q_head,
    stride_k_slot,
    stride_k_head,
    stride_v_slot,
    stride_v_head,
    stride_kt_row,
    stride_kt_head,
    stride_vt_row,
    stride_vt_head,
    stride_mask,
    stride_out_node,
    stride_out_head,
    stride_lse_node,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    WINDOW_LEFT: tl.constexpr,
    HAS_LENS: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_CAP: tl.constexpr,
    STORE_LSE: tl.constexpr,
    TREE_IN_CACHE: tl.constexpr,
    PREFETCH: tl.constexpr,
    USE_PDL: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STEP: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):
    """One program: BLOCK_M query rows of a (request, KV head) against one split of its keys."""
    m_tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    program = tl.program_id(2)
    if USE_PDL:
        gdc_wait()
        gdc_launch_dependents()  # only now: the merge plans from what this launch waited for
    splits, first_program, first_part = plan_splits(
        kv_indptr_ptr, context_lens_ptr, key_indptr_ptr, batch, num_slots,
        min_tiles, WINDOW_LEFT, HAS_LENS, BLOCK_N, STEP, BLOCK_B,
    )  # fmt: skip
    request = tl.sum((first_program + splits <= program).to(tl.int32), axis=0)
    if request >= batch:
        return
    node_start = tl.load(qo_indptr_ptr + request)
    rows = (tl.load(qo_indptr_ptr + request + 1) - node_start).to(tl.int32) * GROUP
    offs_m = m_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    mask_m = offs_m < rows
    if m_tile * BLOCK_M >= rows:
        return
    kv_start = tl.load(kv_indptr_ptr + request)
    if HAS_LENS:
        length = tl.load(context_lens_ptr + request).to(tl.int32)
    else:
        length = (tl.load(kv_indptr_ptr + request + 1) - kv_start).to(tl.int32)
    key_start = tl.load(key_indptr_ptr + request)
    keys = (tl.load(key_indptr_ptr + request + 1) - key_start).to(tl.int32)
    first_key = 0
    if WINDOW_LEFT >= 0:
        first_key = length - tl.minimum(length, WINDOW_LEFT)
    whole, tail = count_tiles(length - first_key, keys, BLOCK_N)
    splits = pick(splits, request, BLOCK_B)
    split = program - pick(first_program, request, BLOCK_B)
    first, last, tail_first, tail_last = split_tiles(split, splits, whole, tail, STEP)

    offs_n = tl.arange(0, BLOCK_N)
    offs_d = tl.arange(0, BLOCK_D)
    offs_dv = tl.arange(0, BLOCK_DV)
    node = (node_start + offs_m // GROUP).to(tl.int64)
    head = kv_head * GROUP + offs_m % GROUP
    q_row_ptr = q_ptr + node * stride_q_node + head * stride_q_head
    q = tl.load(
        q_row_ptr[:, None] + offs_d[None, :],
        mask=mask_m[:, None] & (offs_d < D)[None, :],
        other=0.0,
    )
    if WINDOW_LEFT >= 0:
        depth = tl.load(depths_ptr + node, mask=mask_m, other=0).to(tl.int32)
    indices_ptr = kv_indices_ptr + kv_start
    k_head_ptr = k_cache_ptr + kv_head * stride_k_head
    v_head_ptr = v_cache_ptr + kv_head * stride_v_head
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    m_i = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l_i = tl.zeros([BLOCK_M], tl.float32)

    KEYS: tl.constexpr = STEP * BLOCK_N
    offs_k = tl.arange(0, KEYS)
    left = (last - first) % STEP  # whole tiles that the loop over KEYS leaves
    lo = first_key + first * BLOCK_N
    hi = first_key + (last - left) * BLOCK_N
    all_k = offs_k < KEYS
    slots = page_slots(indices_ptr, lo + offs_k, lo + offs_k < hi, PAGE_SIZE)
    for start in range(lo, hi, KEYS):
        if PREFETCH:
            ahead = start + KEYS + offs_k
            next_slots = page_slots(indices_ptr, ahead, ahead < hi, PAGE_SIZE)
        else:
            slots = page_slots(indices_ptr, start + offs_k, all_k, PAGE_SIZE)
        k = load_rows(k_head_ptr, slots, stride_k_slot, offs_d, all_k, D, False)
        scores, scale = capped(
            tl.dot(q, tl.trans(k.to(q.dtype))), sm_scale * k_scale, logit_cap, HAS_CAP
        )
        if WINDOW_LEFT >= 0:
            distance = length - start - offs_k[None, :] + depth[:, None]
            scores = tl.where(distance <= WINDOW_LEFT, scores, float("-inf"))
        weights, alpha, m_i, l_i = softmax_weights(scores, scale, m_i, l_i, WINDOW_LEFT >= 0)
        v = load_rows(v_head_ptr, slots, stride_v_slot, offs_dv, all_k, DV, False)
        acc = tl.dot(weights.to(q.dtype), v.to(q.dtype), acc * alpha[:, None])
        if PREFETCH:
            slots = next_slots
    # What is left of the whole tiles, then the tail: the rest of the context, the tree's own keys.
    kt_head_ptr = k_tree_ptr + kv_head * stride_kt_head
    vt_head_ptr = v_tree_ptr + kv_head * stride_vt_head
    mask_row_ptr = mask_ptr + node * stride_mask
    rest = ((length - first_key) % BLOCK_N > 0).to(tl.int32)
    # What the compiler would move in front of this loop would fill registers in the one above.
    for turn in tl.range(0, left + tail_last - tail_first, num_stages=1, disable_licm=True):
        tile = tail_first + turn - left
        in_tree = (turn >= left) & (tile >= rest)
        in_context = tl.where(turn < left, hi + turn * BLOCK_N, first_key + whole * BLOCK_N)
        start = tl.where(in_tree, (tile - rest) * BLOCK_N, in_context)
        mask_n = start + offs_n < tl.where(in_tree, keys, length)
        if not in_tree:
            rows_n = page_slots(indices_ptr, start + offs_n, mask_n, PAGE_SIZE).to(tl.int64)
        elif TREE_IN_CACHE:
            rows_n = tl.load(tree_slots_ptr + key_start + start + offs_n, mask=mask_n, other=0)
            rows_n = rows_n.to(tl.int64)
        else:
            rows_n = (key_start + start + offs_n).to(tl.int64)
        k = load_either(
            in_tree, kt_head_ptr, k_head_ptr, rows_n, stride_kt_row, stride_k_slot, offs_d, mask_n,
            D, q.dtype,
        )  # fmt: skip
        words = tl.where(in_tree, mask_words, 0)
        visible, seen_n = tree_visible(mask_row_ptr, mask_m, start, words, BLOCK_N)
        visible = tl.where(in_tree, visible, True) & mask_n[None, :]
        # A slot that no node sees may hold anything, and 0 x NaN is NaN.
        seen_n = tl.where(in_tree, seen_n, True) & mask_n
        if WINDOW_LEFT >= 0:
            key_depth = tl.load(
                key_depths_ptr + key_start + start + offs_n,
                mask=start + offs_n < tl.where(in_tree, keys, 0),
                other=0,
            ).to(tl.int32)
            key_depth = tl.where(in_tree, key_depth, start + offs_n - length)
            visible = visible & (depth[:, None] - key_depth[None, :] <= WINDOW_LEFT)
        v = load_either(
            in_tree, vt_head_ptr, v_head_ptr, rows_n, stride_vt_row, stride_v_slot, offs_dv, seen_n,
            DV, q.dtype,
        )  # fmt: skip
        tile_scale, v_factor = sm_scale * k_scale, 1.0
        if not TREE_IN_CACHE:
            tile_scale = sm_scale * tl.where(in_tree, 1.0, k_scale)
            v_factor = tl.where(in_tree, 1.0 / v_scale, 1.0)
        scores, scale = capped(tl.dot(q, tl.trans(in_registers(k))), tile_scale, logit_cap, HAS_CAP)
        scores = tl.where(visible, scores, float("-inf"))
        weights, alpha, m_i, l_i = softmax_weights(scores, scale, m_i, l_i, True)
        p = (weights * v_factor).to(q.dtype)
        acc = tl.dot(p, in_registers(v), acc * alpha[:, None])

    # Rows' addresses kept from above would fill registers in the loops. They are computed again,
    # from a value that the compiler cannot know to be the same.
    again = tl.load(qo_indptr_ptr + request, volatile=True)
    offs_m = (again - node_start).to(tl.int32) + m_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    mask_m = offs_m < rows
    node = (again + offs_m // GROUP).to(tl.int64)
    head = kv_head * GROUP + offs_m % GROUP
    if HAS_SINKS and splits == 1:
        sink = tl.load(sinks_ptr + head, mask=mask_m, other=0.0).to(tl.float32) * LOG2_E
        m_new = tl.maximum(m_i, sink)
        shift = tl.where(m_new == float("-inf"), 0.0, m_new)
        rescale = tl.exp2(m_i - shift)
        acc, m_i = acc * rescale[:, None], m_new
        l_i = l_i * rescale + tl.exp2(sink - shift)
    out, lse = normalise(acc, m_i, l_i, v_scale)
    store_dv = mask_m[:, None] & (offs_dv < DV)[None, :]
    if splits == 1:
        out_rows = out_ptr + node * stride_out_node + head * stride_out_head
        tl.store(
            out_rows[:, None] + offs_dv[None, :], out.to(out_ptr.dtype.element_ty), mask=store_dv
        )
        if STORE_LSE:
            tl.store(lse_ptr + node * stride_lse_node + head, lse * LN_2, mask=mask_m)
    else:
        part = pick(first_part, request, BLOCK_B) + split
        part_row = (part.to(tl.int64) * tl.num_programs(1) + kv_head) * max_rows + offs_m
        tl.store(part_lse_ptr + part_row, lse, mask=mask_m)
        tl.store(part_out_ptr + part_row[:, None] * DV + offs_dv[None, :], out, mask=store_dv)
