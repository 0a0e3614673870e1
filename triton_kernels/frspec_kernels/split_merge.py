# ruff: noqa: ANN001, ANN201 (values inside a kernel have no Python types)
# pyright: reportOperatorIssue=false, reportArgumentType=false
"""Splitting a ragged batch of key lists over the GPU, and merging the parts' softmax states.

A request with context ``n`` and ``t`` tree keys has ``floor(n / BLOCK_N)`` whole tiles, which need
no mask, and a tail of masked tiles: what is left of the context, then the tree's keys. A masked
tile takes about as long as two whole ones: nothing of it is loaded ahead. The launch has a fixed
number of slots; each program recomputes the same plan from the lengths on the device, so one
captured launch serves any lengths:

    weight_b = whole_b + 2 tail_b
    steps_b = floor(whole_b / STEP) + tail_b
    splits_b = clamp(round(slots * weight_b / sum(weight)), 1, floor(steps_b / min_tiles))

Split ``s`` of ``S`` takes the tiles that begin in ``[s, s + 1) * weight_b / S``, both ends rounded
down to a multiple of STEP. A program takes STEP whole tiles at once: larger products, fewer turns.
What is left of its whole tiles after that, less than STEP, goes with the masked ones.

Rounding to the nearest keeps ``sum(splits) <= slots + B``, and requests that are really split use
at most ``4/3 * slots`` parts (each such share is >= 1.5), which bounds the workspace for any batch.

A part stores its normalised output and ``lse = max + log2(sum)`` (base 2, float32). Merging weighs
each part by ``2 ** (lse - max lse)``. Letters: ``B`` requests, ``R`` rows of a request (nodes x
query heads of one KV head), ``P`` parts, ``S`` splits of one request.
"""

import triton
import triton.language as tl

from frspec_kernels.pdl import wait_for_previous

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
TAIL_WEIGHT = tl.constexpr(2)  # of a masked tile, in whole ones


@triton.jit
def plan_splits(
    kv_indptr_ptr,  # [B + 1], or [B] row starts when HAS_LENS
    context_lens_ptr,  # [B], read when HAS_LENS
    key_indptr_ptr,  # [B + 1] tree keys
    batch,
    num_slots,
    min_tiles,
    WINDOW_LEFT: tl.constexpr,
    HAS_LENS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STEP: tl.constexpr,
    BLOCK_B: tl.constexpr,
):
    """Per request: splits, first program, first part. The same in every program."""
    offs_b = tl.arange(0, BLOCK_B)
    mask_b = offs_b < batch
    if HAS_LENS:
        context = tl.load(context_lens_ptr + offs_b, mask=mask_b, other=0).to(tl.int32)
    else:
        end = tl.load(kv_indptr_ptr + offs_b + 1, mask=mask_b, other=0)
        context = (end - tl.load(kv_indptr_ptr + offs_b, mask=mask_b, other=0)).to(tl.int32)
    if WINDOW_LEFT >= 0:
        context = tl.minimum(context, WINDOW_LEFT)
    keys = tl.load(key_indptr_ptr + offs_b + 1, mask=mask_b, other=0)
    keys = (keys - tl.load(key_indptr_ptr + offs_b, mask=mask_b, other=0)).to(tl.int32)
    whole, tail = count_tiles(context, keys, BLOCK_N)
    # A request with queries but nothing to see still needs a program to write its zeros.
    weight = tl.where(mask_b, tl.maximum(whole + TAIL_WEIGHT * tail, 1), 0)
    total = tl.maximum(tl.sum(weight, axis=0), 1)
    splits = (2 * weight * num_slots + total) // (2 * total)
    splits = tl.maximum(tl.minimum(splits, (whole // STEP + tail) // min_tiles), 1)
    splits = tl.where(mask_b, splits, 0)
    parts = tl.where(splits > 1, splits, 0)
    first_program = tl.cumsum(splits, axis=0) - splits
    first_part = tl.cumsum(parts, axis=0) - parts
    return splits, first_program, first_part


@triton.jit
def count_tiles(context, keys, BLOCK_N: tl.constexpr):
    """Whole context tiles, and tiles of the tail."""
    rest = (context % BLOCK_N > 0).to(tl.int32)
    return context // BLOCK_N, rest + (keys + BLOCK_N - 1) // BLOCK_N


@triton.jit
def split_tiles(split, splits, whole, tail, STEP: tl.constexpr):
    """First and last + 1 of a split's whole tiles, then of its tail's tiles."""
    weight = whole + TAIL_WEIGHT * tail
    first = split * weight // splits // STEP * STEP
    last = (split + 1) * weight // splits // STEP * STEP
    last = tl.where(split + 1 == splits, weight, last)
    tail_first = (tl.maximum(first - whole, 0) + TAIL_WEIGHT - 1) // TAIL_WEIGHT
    tail_last = (tl.maximum(last - whole, 0) + TAIL_WEIGHT - 1) // TAIL_WEIGHT
    return tl.minimum(first, whole), tl.minimum(last, whole), tail_first, tail_last


@triton.jit
def pick(values, index, BLOCK_B: tl.constexpr):
    """``values[index]`` of a register tensor."""
    return tl.sum(tl.where(tl.arange(0, BLOCK_B) == index, values, 0), axis=0)


@triton.jit
def softmax_weights(
    scores,  # [BLOCK_M, BLOCK_N] float32
    scale,  # base-2 logits are scores * scale
    m_i,  # [BLOCK_M] float32
    l_i,  # [BLOCK_M] float32
    MASKED: tl.constexpr,
):
    """Weights of one more tile, the factor of what was summed before, the new maximum and sum.

    With MASKED a row may be all ``-inf``.
    """
    m_new = tl.maximum(m_i, tl.max(scores, axis=1) * scale)
    shift = m_new
    if MASKED:
        shift = tl.where(m_new == float("-inf"), 0.0, m_new)
    alpha = tl.exp2(m_i - shift)
    p = tl.exp2(scores * scale - shift[:, None])
    return p, alpha, m_new, l_i * alpha + tl.sum(p, axis=1)


@triton.jit
def normalise(acc, m_i, l_i, factor):
    """``factor`` x output, and base-2 log-sum-exp; 0 and ``-inf`` where nothing was seen."""
    seen = l_i > 0
    safe = tl.where(seen, l_i, 1.0)
    lse = tl.where(seen, m_i + tl.log2(safe), float("-inf"))
    return acc * (factor / safe)[:, None], lse


@triton.jit(do_not_specialize=["batch", "num_slots", "min_tiles", "max_rows"])
def merge_splits_kernel(
    part_out_ptr,  # [P, KVH, R, DV] float32
    part_lse_ptr,  # [P, KVH, R] float32, base 2
    sinks_ptr,  # [QH] float
    out_ptr,  # [T, QH, DV]
    lse_ptr,  # [T, QH] float32
    qo_indptr_ptr,  # [B + 1]
    kv_indptr_ptr,
    context_lens_ptr,
    key_indptr_ptr,
    batch,
    num_slots,
    min_tiles,
    max_rows,
    stride_out_node,
    stride_out_head,
    stride_lse_node,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DV: tl.constexpr,
    WINDOW_LEFT: tl.constexpr,
    HAS_LENS: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    STORE_LSE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STEP: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """BLOCK_R rows of a (request, KV head) at a time: weighted mean of the parts, sink included.

    Programs stride over the row blocks of the requests that are split: when none is, they end.
    """
    # The plan reads what the splits' launch waited for, so it may run before they have finished.
    splits_b, _, first_part_b = plan_splits(
        kv_indptr_ptr, context_lens_ptr, key_indptr_ptr, batch, num_slots,
        min_tiles, WINDOW_LEFT, HAS_LENS, BLOCK_N, STEP, BLOCK_B,
    )  # fmt: skip
    offs_b = tl.arange(0, BLOCK_B)
    mask_b = offs_b < batch
    node_start_b = tl.load(qo_indptr_ptr + offs_b, mask=mask_b, other=0)
    node_end_b = tl.load(qo_indptr_ptr + offs_b + 1, mask=mask_b, other=0)
    rows_b = (node_end_b - node_start_b).to(tl.int32) * GROUP
    blocks_b = tl.where(splits_b > 1, (rows_b + BLOCK_R - 1) // BLOCK_R * KV_HEADS, 0)
    ends_b = tl.cumsum(blocks_b, axis=0)
    offs_s = tl.arange(0, BLOCK_S)
    offs_d = tl.arange(0, BLOCK_DV)
    mask_d = offs_d < DV
    wait_for_previous(USE_PDL)
    for block in range(tl.program_id(0), tl.sum(blocks_b, axis=0), tl.num_programs(0)):
        request = tl.sum((ends_b <= block).to(tl.int32), axis=0)
        local = block - pick(ends_b - blocks_b, request, BLOCK_B)
        kv_head = local % KV_HEADS
        row = local // KV_HEADS * BLOCK_R + tl.arange(0, BLOCK_R)
        mask_r = row < pick(rows_b, request, BLOCK_B)
        splits = pick(splits_b, request, BLOCK_B)
        first_part = pick(first_part_b, request, BLOCK_B)
        node = (pick(node_start_b, request, BLOCK_B) + row // GROUP).to(tl.int64)
        head = kv_head * GROUP + row % GROUP
        if HAS_SINKS:
            sink = tl.load(sinks_ptr + head, mask=mask_r, other=float("-inf"))
            m_i = sink.to(tl.float32) * LOG2_E
        else:
            m_i = tl.full([BLOCK_R], float("-inf"), tl.float32)
        l_i = tl.where(m_i == float("-inf"), 0.0, 1.0)
        acc = tl.zeros([BLOCK_R, BLOCK_DV], tl.float32)
        # Parts and rows beyond the last stand for the last, with weight 0 and without a store: of
        # loads with a mask each would be used before the next is issued, a latency for every part.
        row = tl.minimum(row, pick(rows_b, request, BLOCK_B) - 1)
        for start in range(0, splits, BLOCK_S):
            split = tl.minimum(start + offs_s, splits - 1)
            part = (first_part + split).to(tl.int64) * KV_HEADS + kv_head
            part_row = part[:, None] * max_rows + row[None, :]
            lse = tl.load(part_lse_ptr + part_row)
            out_ptrs = part_out_ptr + part_row[:, :, None] * DV + offs_d[None, None, :]
            if BLOCK_DV == DV:
                outs = tl.load(out_ptrs)
            else:
                outs = tl.load(out_ptrs, mask=mask_d[None, None, :], other=0.0)
            lse = tl.where((start + offs_s < splits)[:, None], lse, float("-inf"))
            m_new = tl.maximum(m_i, tl.max(lse, axis=0))
            shift = tl.where(m_new == float("-inf"), 0.0, m_new)
            alpha = tl.exp2(m_i - shift)
            weights = tl.exp2(lse - shift[None, :])
            l_i = l_i * alpha + tl.sum(weights, axis=0)
            acc = acc * alpha[:, None] + tl.sum(outs * weights[:, :, None], axis=0)
            m_i = m_new
        acc, lse_2 = normalise(acc, m_i, l_i, 1.0)
        out = out_ptr + node * stride_out_node + head * stride_out_head
        tl.store(
            out[:, None] + offs_d[None, :],
            acc.to(out_ptr.dtype.element_ty),
            mask=mask_r[:, None] & mask_d[None, :],
        )
        if STORE_LSE:
            tl.store(lse_ptr + node * stride_lse_node + head, lse_2 * LN_2, mask=mask_r)
