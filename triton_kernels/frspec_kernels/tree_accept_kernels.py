# ruff: noqa: ANN001, ANN201 (values inside a kernel have no Python types)
# pyright: reportOperatorIssue=false, reportArgumentType=false, reportCallIssue=false
"""Kernels that verify a draft tree greedily; see :mod:`frspec_kernels.tree` for the terms."""

import triton
import triton.language as tl

from .pdl import wait_for_previous
from .primitives import LOWEST_KEY, MAX_TOKEN_ID, key_token_id, score_order, sortable_key

NAN_LEAD = tl.constexpr(2**30)  # above every token id


@triton.jit
def argmax_kernel(
    logits_ptr,  # [T, V]
    keys_ptr,  # [T, P] int64
    V,
    stride_logits,
    P: tl.constexpr,
    SLICE: tl.constexpr,
    BLOCK: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """Program (t, p): the sortable key of the largest logit of row t among slice p.

    The maximum first, then the smallest id that has it: two short reductions of a block that stays
    in registers, cheaper than carrying ids along. A NaN stands in as +inf whose id counts
    ``NAN_LEAD`` less, so that it beats every number.
    """
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    wait_for_previous(USE_PDL)
    lane = tl.arange(0, BLOCK)
    best = tl.full([], LOWEST_KEY, tl.int64)
    for start in range(part * SLICE, part * SLICE + SLICE, BLOCK):
        token = start + lane  # the slice begins below V, so lanes from V on never have the least id
        at = logits_ptr + row * stride_logits + token
        logit = tl.load(at, mask=token < V, other=float("-inf")).to(tl.float32)
        unordered = logit != logit
        score = tl.where(unordered, float("inf"), logit)
        top = tl.max(score, axis=0)
        claim = tl.where(unordered, token - NAN_LEAD, token)
        winner = tl.min(tl.where(score == top, claim, NAN_LEAD), axis=0)
        order = tl.where(winner < 0, MAX_TOKEN_ID, score_order(top))
        winner = tl.where(winner < 0, winner + NAN_LEAD, winner)
        best = tl.maximum(best, sortable_key(order, winner))
    tl.store(keys_ptr + row * P + part, best)


@triton.jit
def accept_greedy_kernel(
    tokens_ptr,  # [B, N] int64
    parents_ptr,  # [B, N] int32
    target_ptr,  # [B, N] int64 token ids when P = 0, else [B * N, P] int64 keys
    seq_lens_ptr,  # [B] int64 | int32
    slots_ptr,  # [B * N] int64 | int32, or None
    accept_index_ptr,  # [B, D] int32
    accept_lens_ptr,  # [B] int32
    predicts_ptr,  # [B * N] int32
    path_tokens_ptr,  # [B, D] int64
    bonus_tokens_ptr,  # [B] int64
    new_seq_lens_ptr,  # [B] int64
    source_slots_ptr,  # [B, D] int64 or None
    target_slots_ptr,  # [B, D] int64 or None
    N: tl.constexpr,
    D: tl.constexpr,
    P: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_P: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """The accepted path of one request, by passing acceptance down from parent to child."""
    request = tl.program_id(0).to(tl.int64)
    node = tl.arange(0, BLOCK_N)
    inside = node < N
    at = request * N + node
    wait_for_previous(USE_PDL)
    token = tl.load(tokens_ptr + at, mask=inside, other=-1)
    parent = tl.maximum(tl.load(parents_ptr + at, mask=inside, other=0), 0)
    if P == 0:
        target = tl.load(target_ptr + at, mask=inside, other=-2).to(tl.int32)
    else:
        part = tl.arange(0, BLOCK_P)[None, :]
        keys_at = target_ptr + at[:, None] * P + part
        keys = tl.load(keys_at, mask=inside[:, None] & (part < P), other=LOWEST_KEY)
        target = key_token_id(tl.max(keys, axis=1)).to(tl.int32)
    root = node == 0
    agrees = (root | (inside & (token == tl.gather(target, parent, 0)))).to(tl.int32)
    # From the root alone: step i reaches depth i, so nodes from depth D on are never accepted.
    accepted, depth = root.to(tl.int32), node * 0
    for _ in range(D - 1):
        accepted = agrees & tl.gather(accepted, parent, 0)
        depth = tl.where(root, 0, tl.gather(depth, parent, 0) + 1)
    count = tl.sum(accepted, axis=0)
    on_path = accepted != 0
    tl.store(predicts_ptr + at, tl.where(on_path, target, 0), mask=inside)
    tl.store(accept_lens_ptr + request, count)
    tl.store(new_seq_lens_ptr + request, tl.load(seq_lens_ptr + request).to(tl.int64) + count)
    path_at = request * D + depth
    tl.store(accept_index_ptr + path_at, at.to(tl.int32), mask=on_path)
    tl.store(path_tokens_ptr + path_at, target.to(tl.int64), mask=on_path)
    last = on_path & (depth == count - 1)
    tl.store(bonus_tokens_ptr + request + node * 0, target.to(tl.int64), mask=last)

    place = tl.arange(0, BLOCK_D)
    unused = (place < D) & (place >= count)
    tl.store(accept_index_ptr + request * D + place, place * 0 - 1, mask=unused)
    tl.store(path_tokens_ptr + request * D + place, (place * 0).to(tl.int64), mask=unused)
    if slots_ptr is not None:
        front = request * N + tl.minimum(place, N - 1)
        front_slot = tl.load(slots_ptr + front).to(tl.int64)
        tl.store(target_slots_ptr + request * D + place, front_slot, mask=place < D)
        tl.store(source_slots_ptr + request * D + place, front_slot, mask=unused)
        slot = tl.load(slots_ptr + at, mask=inside, other=0).to(tl.int64)
        tl.store(source_slots_ptr + path_at, slot, mask=on_path)
