# ruff: noqa: ANN001, ANN201 (values inside a kernel have no Python types)
# pyright: reportCallIssue=false, reportArgumentType=false
"""How well a token map fits what a server generates, counted on the GPU.

    totals += [Σ_b 1, Σ_b lens[b], Σ_b |{j < lens[b] : tokens[b, j] is not hot}|]

over the requests whose row of the table of slots is not 0: the padding of a CUDA graph has that
row. Sums of integers, so no order of the additions shows.

Letters: ``B`` requests, ``N`` columns, ``V`` vocabulary.

CUDA-graph safe: one launch, no allocation; the host reads ``totals`` when it likes.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .compile_spec import CompileSpec

TOTALS = 3  # requests, tokens, tokens outside the map


def tally_reference(
    tokens: Tensor, lens: Tensor, rows: Tensor, is_hot: Tensor, totals: Tensor
) -> None:
    """:func:`tally` in PyTorch."""
    counted = torch.arange(tokens.shape[1], device=tokens.device) < lens[:, None]
    counted &= (rows != 0)[:, None]
    outside = counted & ~is_hot[tokens.long()]
    totals += torch.stack([(rows != 0).sum(), counted.sum(), outside.sum()])


@triton.jit(do_not_specialize=["columns"])
def tally_kernel(
    tokens_ptr,  # [B, N] int32
    lens_ptr,  # [B] int32
    rows_ptr,  # [B] int64
    hot_ptr,  # [V] uint8
    totals_ptr,  # [3] int64
    columns,  # N
    BLOCK: tl.constexpr,
):
    """Program b: one request."""
    request = tl.program_id(0).to(tl.int64)
    if tl.load(rows_ptr + request) != 0:
        length = tl.minimum(tl.load(lens_ptr + request), columns)
        column = tl.arange(0, BLOCK)
        counted = column < length
        token = tl.load(tokens_ptr + request * columns + column, mask=counted, other=0)
        hot = tl.load(hot_ptr + token.to(tl.int64), mask=counted, other=1)
        outside = tl.sum((counted & (hot == 0)).to(tl.int32), axis=0)
        tl.atomic_add(totals_ptr, 1)
        tl.atomic_add(totals_ptr + 1, length.to(tl.int64))
        tl.atomic_add(totals_ptr + 2, outside.to(tl.int64))


def tally(tokens: Tensor, lens: Tensor, rows: Tensor, is_hot: Tensor, totals: Tensor) -> None:
    """Count a round's tokens into ``totals``.

    Args:
        tokens: ``[B, N]`` int32, contiguous; those past a request's length are not read.
        lens: ``[B]`` int32, at most N.
        rows: ``[B]`` int64; requests with row 0 are left out.
        is_hot: ``[V]`` bool; every counted token is below V.
        totals: ``[3]`` int64: requests, tokens, and tokens that are not hot; added to.

    Raises:
        TypeError, ValueError: types or shapes other than these.
    """
    batch = lens.shape[0]
    wanted = (
        ("tokens", tokens, (batch, tokens.shape[-1]), torch.int32),
        ("lens", lens, (batch,), torch.int32),
        ("rows", rows, (batch,), torch.int64),
        ("is_hot", is_hot, (is_hot.numel(),), torch.bool),
        ("totals", totals, (TOTALS,), torch.int64),
    )
    for name, tensor, shape, dtype in wanted:
        if tensor.dtype != dtype:
            raise TypeError(f"{name} is {dtype}, got {tensor.dtype}")
        if tuple(tensor.shape) != shape or not tensor.is_contiguous():
            raise ValueError(
                f"{name} is contiguous {list(shape)}, got {list(tensor.shape)} with strides "
                f"{list(tensor.stride())}"
            )
    if batch:
        columns = tokens.shape[1]
        tally_kernel[(batch,)](
            tokens, lens, rows, is_hot.view(torch.uint8), totals, columns,
            BLOCK=triton.next_power_of_2(columns), num_warps=1,
        )  # fmt: skip


def compile_specs() -> list[CompileSpec]:
    """Trees of 16 and of 60 nodes."""
    signature = {
        "tokens_ptr": "*i32:16",
        "lens_ptr": "*i32",
        "rows_ptr": "*i64:16",
        "hot_ptr": "*u8:16",
        "totals_ptr": "*i64:16",
        "columns": "i32",
    }
    return [CompileSpec(tally_kernel, signature, {"BLOCK": n}, num_warps=1) for n in (16, 64)]
