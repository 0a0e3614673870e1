# ruff: noqa: ANN001, ANN201 (values inside a kernel have no Python types)
# pyright: reportOperatorIssue=false, reportArgumentType=false
"""Splitting a ragged batch of key lists over the GPU, and merging the parts' softmax states.

A request with context ``n`` and ``t`` tree keys has ``ceil(n / BLOCK_N) + ceil(t / BLOCK_N)`` key
tiles. The launch has a fixed number of slots; each program recomputes the same plan from the
lengths on the device, so one captured launch serves any lengths:

    splits_b = clamp(round(slots * tiles_b / sum(tiles)), 1, floor(tiles_b / min_tiles))

Rounding to the nearest keeps ``sum(splits) <= slots + B``, and requests that are really split use
at most ``4/3 * slots`` parts (each such share is >= 1.5), which bounds the workspace for any batch.

A part stores its normalised output and ``lse = max + log2(sum)`` (base 2, float32). Merging weighs
each part by ``2 ** (lse - max lse)``. Letters: ``B`` requests, ``R`` rows of a request (nodes x
query heads of one KV head), ``P`` parts, ``S`` splits of one request.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


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
    BLOCK_B: tl.constexpr,
):
    """Per request: tiles in a split, splits, first program, first part. Same in every program."""
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
    tiles = (context + BLOCK_N - 1) // BLOCK_N + (keys + BLOCK_N - 1) // BLOCK_N
    # A request with queries but nothing to see still needs a program to write its zeros.
    tiles = tl.where(mask_b, tl.maximum(tiles, 1), 0)
    total = tl.maximum(tl.sum(tiles, axis=0), 1)
    splits = (2 * tiles * num_slots + total) // (2 * total)
    splits = tl.maximum(tl.minimum(splits, tiles // min_tiles), 1)
    chunk = tl.maximum((tiles + splits - 1) // splits, 1)
    splits = (tiles + chunk - 1) // chunk
    parts = tl.where(splits > 1, splits, 0)
    first_program = tl.cumsum(splits, axis=0) - splits
    first_part = tl.cumsum(parts, axis=0) - parts
    return chunk, splits, first_program, first_part


@triton.jit
def pick(values, index, BLOCK_B: tl.constexpr):
    """``values[index]`` of a register tensor."""
    return tl.sum(tl.where(tl.arange(0, BLOCK_B) == index, values, 0), axis=0)


@triton.jit
def softmax_step(
    scores,  # [BLOCK_M, BLOCK_N] float32
    scale,  # base-2 logits are scores * scale
    v,  # [BLOCK_N, BLOCK_DV]
    acc,  # [BLOCK_M, BLOCK_DV] float32
    m_i,  # [BLOCK_M] float32
    l_i,  # [BLOCK_M] float32
    MASKED: tl.constexpr,
    v_factor=1.0,  # of v in the units of acc, applied when MASKED
):
    """One online-softmax step in base 2; with MASKED a row may be all ``-inf``."""
    m_new = tl.maximum(m_i, tl.max(scores, axis=1) * scale)
    shift = m_new
    if MASKED:
        shift = tl.where(m_new == float("-inf"), 0.0, m_new)
    alpha = tl.exp2(m_i - shift)
    p = tl.exp2(scores * scale - shift[:, None])
    l_i = l_i * alpha + tl.sum(p, axis=1)
    if MASKED:
        p = p * v_factor
    acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None])
    return acc, m_new, l_i


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
    GROUP: tl.constexpr,
    DV: tl.constexpr,
    WINDOW_LEFT: tl.constexpr,
    HAS_LENS: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    STORE_LSE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """One program a (node, query head): weighted mean of its parts, sink included."""
    node = tl.program_id(0)
    head = tl.program_id(1)
    offs_b = tl.arange(0, BLOCK_B)
    ends = tl.load(qo_indptr_ptr + offs_b + 1, mask=offs_b < batch, other=2147483647)
    request = tl.sum((ends <= node).to(tl.int32), axis=0)
    _, splits, _, first_part = plan_splits(
        kv_indptr_ptr, context_lens_ptr, key_indptr_ptr, batch, num_slots,
        min_tiles, WINDOW_LEFT, HAS_LENS, BLOCK_N, BLOCK_B,
    )  # fmt: skip
    splits = pick(splits, request, BLOCK_B)
    if USE_PDL:
        # Also where there is nothing to merge: the launch ends when its programs have, and what
        # comes next reads what the splits' programs wrote.
        gdc_wait()
    if (request >= batch) | (splits <= 1):
        return
    first_part = pick(first_part, request, BLOCK_B)
    kv_heads = tl.num_programs(1) // GROUP
    local = (node - tl.load(qo_indptr_ptr + request)).to(tl.int32)
    row = local * GROUP + head % GROUP
    offs_s = tl.arange(0, BLOCK_S)
    offs_d = tl.arange(0, BLOCK_DV)
    mask_d = offs_d < DV
    if HAS_SINKS:
        m_i = tl.zeros([1], tl.float32) + tl.load(sinks_ptr + head).to(tl.float32) * LOG2_E
    else:
        m_i = tl.full([1], float("-inf"), tl.float32)
    l_i = tl.where(m_i == float("-inf"), 0.0, 1.0)
    acc = tl.zeros([BLOCK_DV], tl.float32)
    for start in range(0, splits, BLOCK_S):
        mask_s = start + offs_s < splits
        part = ((first_part + start + offs_s).to(tl.int64) * kv_heads + head // GROUP) * max_rows
        part += row
        lse = tl.load(part_lse_ptr + part, mask=mask_s, other=float("-inf"))
        outs = tl.load(
            part_out_ptr + part[:, None] * DV + offs_d[None, :],
            mask=mask_s[:, None] & mask_d[None, :],
            other=0.0,
        )
        m_new = tl.maximum(m_i, tl.max(lse, axis=0))
        shift = tl.where(m_new == float("-inf"), 0.0, m_new)
        alpha = tl.exp2(m_i - shift)
        weights = tl.exp2(lse - shift)
        l_i = l_i * alpha + tl.sum(weights, axis=0)
        acc = acc * alpha + tl.sum(outs * weights[:, None], axis=0)
        m_i = m_new
    seen = l_i > 0
    acc = acc / tl.where(seen, l_i, 1.0)
    out = out_ptr + node.to(tl.int64) * stride_out_node + head * stride_out_head + offs_d
    tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=mask_d)
    if STORE_LSE:
        lse_2 = tl.where(seen, m_i + tl.log2(tl.where(seen, l_i, 1.0)), float("-inf"))
        tl.store(
            lse_ptr + node.to(tl.int64) * stride_lse_node + head + tl.arange(0, 1), lse_2 * LN_2
        )
