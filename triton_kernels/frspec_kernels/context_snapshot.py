# ruff: noqa: ANN001, ANN201 (values inside a kernel have no Python types)
# pyright: reportCallIssue=false, reportArgumentType=false
"""What tree attention needs to know of a batch: contexts' slots, and masks as bits.

    slots[b, i] = table[rows[b], i],   i < lengths[b] = max(seq_lens[b] - tail, 0)

A server's table of slots changes while a round runs. One launch copies the batch's rows, as int32,
so that all layers and phases of the round read the same ones, half as wide.

Letters: ``B`` requests, ``R`` rows of the table, ``L`` its width, ``N`` nodes of a request's tree,
``W`` = ⌈N / 32⌉ mask words.

CUDA-graph safe: grids follow from shapes, lengths are read on the device.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .compile_spec import CompileSpec

BLOCK_SLOTS = 1024
# Programs of one request: at batch 1 a context of 32k is copied by 16 of them in two turns.
MAX_PROGRAMS = 16
MASK_ROWS = 16  # nodes whose bits one program packs
INDEX_TYPES = (torch.int32, torch.int64)


def snapshot_reference(
    table: Tensor, rows: Tensor, seq_lens: Tensor, tail: int = 0
) -> list[Tensor]:
    """The slots of each request's context."""
    lengths = (seq_lens - tail).clamp(min=0).tolist()
    return [table[row, :length].int() for row, length in zip(rows.tolist(), lengths, strict=True)]


@triton.jit(do_not_specialize=["tail"])
def snapshot_kernel(
    table_ptr,  # [R, L] int32 | int64
    rows_ptr,  # [B] int32 | int64
    seq_lens_ptr,  # [B] int32 | int64
    slots_ptr,  # [B, L] int32
    lengths_ptr,  # [B] int32
    stride_table,
    stride_slots,
    tail,
    BLOCK: tl.constexpr,
):
    """Program (b, p): blocks p, p + P, … of request b."""
    request = tl.program_id(0).to(tl.int64)
    program = tl.program_id(1)
    length = tl.maximum(tl.load(seq_lens_ptr + request).to(tl.int32) - tail, 0)
    if program == 0:
        tl.store(lengths_ptr + request, length)
    row = tl.load(rows_ptr + request).to(tl.int64)
    offsets = tl.arange(0, BLOCK)
    for start in range(program * BLOCK, length, tl.num_programs(1) * BLOCK):
        column = start + offsets
        inside = column < length
        slots = tl.load(table_ptr + row * stride_table + column, mask=inside)
        tl.store(slots_ptr + request * stride_slots + column, slots.to(tl.int32), mask=inside)


@triton.jit(do_not_specialize=["total"])
def pack_mask_kernel(
    mask_ptr,  # [B * N, N] uint8
    words_ptr,  # [B * N, W] int32
    total,  # B * N
    N: tl.constexpr,
    W: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
):
    """One program: all words of BLOCK_ROWS nodes."""
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None, None]
    word = tl.arange(0, BLOCK_W)[None, :, None]
    bit = tl.arange(0, 32)[None, None, :]
    column = word * 32 + bit
    seen = tl.load(
        mask_ptr + row.to(tl.int64) * N + column, mask=(row < total) & (column < N), other=0
    )
    # Distinct bits: their sum is their union, also where bit 31 makes it negative.
    words = tl.sum((seen != 0).to(tl.int32) << bit, axis=2)
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
    word = tl.arange(0, BLOCK_W)[None, :]
    tl.store(words_ptr + row * W + word, words, mask=(row < total) & (word < W))


def snapshot_contexts(
    table: Tensor, rows: Tensor, seq_lens: Tensor, slots: Tensor, lengths: Tensor, *, tail: int = 0
) -> None:
    """Copy the first ``seq_lens - tail`` slots of each request's row of ``table``.

    Args:
        table: ``[R, L]`` int32 or int64: SGLang's ``req_to_token``.
        rows: ``[B]`` int32 or int64: each request's row.
        seq_lens: ``[B]`` int32 or int64.
        slots: ``[≥ B, ≥ L]`` int32, filled; columns past a request's length are left alone.
        lengths: ``[≥ B]`` int32, filled.
        tail: tokens at the end of ``seq_lens`` that do not belong to the context.

    Raises:
        TypeError, ValueError: types or shapes other than these.
    """
    batch = rows.numel()
    for name, tensor in (("table", table), ("rows", rows), ("seq_lens", seq_lens)):
        if tensor.dtype not in INDEX_TYPES:
            raise TypeError(f"{name} is int32 or int64, got {tensor.dtype}")
    if slots.dtype != torch.int32 or lengths.dtype != torch.int32:
        raise TypeError(f"slots and lengths are int32, got {slots.dtype} and {lengths.dtype}")
    if table.dim() != 2 or table.stride(1) != 1 or slots.dim() != 2 or slots.stride(1) != 1:
        raise ValueError(
            f"table and slots are matrices with contiguous rows, got {tuple(table.shape)} with "
            f"strides {table.stride()} and {tuple(slots.shape)} with strides {slots.stride()}"
        )
    if seq_lens.numel() != batch or min(slots.shape[0], lengths.numel()) < batch:
        raise ValueError(
            f"{batch} rows, but {seq_lens.numel()} seq_lens, {slots.shape[0]} rows of slots and "
            f"{lengths.numel()} lengths"
        )
    if slots.shape[1] < table.shape[1]:
        raise ValueError(f"slots is {slots.shape[1]} wide, the table {table.shape[1]}")
    if batch == 0:
        return
    programs = min(MAX_PROGRAMS, triton.cdiv(table.shape[1], BLOCK_SLOTS))
    snapshot_kernel[(batch, programs)](
        table, rows, seq_lens, slots, lengths, table.stride(0), slots.stride(0), tail,
        BLOCK=BLOCK_SLOTS,
    )  # fmt: skip


def pack_byte_mask(mask: Tensor, nodes: int, words: Tensor) -> None:
    """Bits of ``[B, N, N]`` bytes: key j is bit ``j % 32`` of word ``j // 32`` of a node's row.

    Args:
        mask: bool or uint8, ``B * N * N`` contiguous entries: SGLang's ``QLEN_ONLY`` mask.
        nodes: N.
        words: ``[≥ B * N, W]`` int32, filled.

    Raises:
        TypeError, ValueError: types or shapes other than these.
    """
    if mask.dtype not in (torch.bool, torch.uint8) or words.dtype != torch.int32:
        raise TypeError(f"bool or uint8 to int32 words, got {mask.dtype} to {words.dtype}")
    rows, rest = divmod(mask.numel(), nodes)
    if rest or rows % nodes or not mask.is_contiguous():
        raise ValueError(f"the mask has {mask.numel()} entries: not [B, {nodes}, {nodes}]")
    width = triton.cdiv(nodes, 32)
    if words.dim() != 2 or words.shape[0] < rows or words.shape[1] != width:
        raise ValueError(f"words is at least [{rows}, {width}], got {tuple(words.shape)}")
    if not words.is_contiguous():
        raise ValueError(f"words is contiguous, got strides {words.stride()}")
    if rows == 0:
        return
    pack_mask_kernel[(triton.cdiv(rows, MASK_ROWS),)](
        mask.view(torch.uint8), words, rows, N=nodes, W=width,
        BLOCK_W=triton.next_power_of_2(width), BLOCK_ROWS=MASK_ROWS,
    )  # fmt: skip


def compile_specs() -> list[CompileSpec]:
    """The snapshot with SGLang's types; masks of one word and of two."""
    pointers = {"table_ptr": "*i32:16", "rows_ptr": "*i64:16", "seq_lens_ptr": "*i64:16"}
    outputs = {"slots_ptr": "*i32:16", "lengths_ptr": "*i32:16"}
    numbers = {"stride_table": "i32", "stride_slots": "i32", "tail": "i32"}
    specs = [CompileSpec(snapshot_kernel, pointers | outputs | numbers, {"BLOCK": BLOCK_SLOTS})]
    packing = {"mask_ptr": "*u8:16", "words_ptr": "*i32:16", "total": "i32"}
    for nodes in (16, 60):
        width = triton.cdiv(nodes, 32)
        sizes = {"N": nodes, "W": width, "BLOCK_W": triton.next_power_of_2(width)}
        specs.append(CompileSpec(pack_mask_kernel, packing, sizes | {"BLOCK_ROWS": MASK_ROWS}))
    return specs
