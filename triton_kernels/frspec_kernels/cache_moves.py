# ruff: noqa: ANN001, ANN201 (values inside a kernel have no Python types)
# pyright: reportCallIssue=false, reportArgumentType=false
"""Keys and values of accepted paths brought to the front of their trees, in all layers at once.

    cache[c][target[b, d]] = what cache[c][source[b, d]] was,   d < D

Letters: ``B`` requests, ``D`` places of a path, ``C`` caches (keys and values of each layer), ``S``
slots of a cache.

A target can be the source of an earlier move: the nodes of a path ascend, and their places are the
first ones. So a program reads the words of all moves of a request, waits for its threads, and then
writes. Requests own different slots. Moves whose source is their target are left out.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .compile_spec import CompileSpec
from .devices import check_devices
from .pdl import pdl_options, wait_for_previous

WORD_BYTES = 8
# 256 words are 2 KB, a row of 8 heads of 128 in bf16; 8 such rows take 32 registers of a thread.
BLOCK_WORDS = 256
TILE_WORDS = 2048
WARPS = 4


class CacheRows(NamedTuple):
    """The caches whose rows move together: see :func:`cache_rows`."""

    addresses: Tensor  # [C] int64
    words: Tensor  # [C] int32: of a row
    widest: int
    caches: tuple[Tensor, ...]  # kept, since the kernel reads them by address


def move_paths_reference(caches: Sequence[Tensor], target: Tensor, source: Tensor) -> None:
    """The same in PyTorch."""
    for cache in caches:
        cache[target.flatten()] = cache[source.flatten()]


@triton.jit(do_not_specialize=["D"])
def move_paths_kernel(
    addresses_ptr,  # [C] int64
    words_ptr,  # [C] int32
    target_ptr,  # [B, D] int64
    source_ptr,  # [B, D] int64
    D,
    BLOCK_D: tl.constexpr,
    BLOCK: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """Program (b, c, w): words of block w of the rows of request b in cache c."""
    request = tl.program_id(0).to(tl.int64)
    cache = tl.program_id(1)
    base = tl.load(addresses_ptr + cache).to(tl.pointer_type(tl.int64))
    width = tl.load(words_ptr + cache)
    place = tl.arange(0, BLOCK_D)
    word = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    wait_for_previous(USE_PDL)
    target = tl.load(target_ptr + request * D + place, mask=place < D, other=0)
    source = tl.load(source_ptr + request * D + place, mask=place < D, other=0)
    moved = (target != source)[:, None] & (word < width)[None, :]
    rows = tl.load(base + (source * width)[:, None] + word[None, :], mask=moved)
    tl.debug_barrier()  # a row may be another move's target
    tl.store(base + (target * width)[:, None] + word[None, :], rows, mask=moved)


def cache_rows(caches: Sequence[Tensor]) -> CacheRows:
    """Caches ``[S, …]`` with contiguous rows of whole 8-byte words; they stay where they are.

    Raises:
        ValueError: none, rows that are not contiguous or not of whole words, several devices.
    """
    if not caches:
        raise ValueError("no caches to move rows of")
    words = []
    for cache in caches:
        row = cache[:1]
        size = row.numel() * cache.element_size()
        if cache.dim() < 2 or not row.is_contiguous() or cache.stride(0) != row.numel():
            raise ValueError(
                f"a cache is [slots, …] and contiguous, got {tuple(cache.shape)} with strides"
                f" {cache.stride()}"
            )
        if size % WORD_BYTES or cache.data_ptr() % WORD_BYTES:
            raise ValueError(
                f"rows of {size} bytes at address {cache.data_ptr():#x} are not made of words of"
                f" {WORD_BYTES} bytes"
            )
        words.append(size // WORD_BYTES)
    device = caches[0].device
    check_devices(device, **{f"caches[{i}]": cache for i, cache in enumerate(caches)})
    return CacheRows(
        torch.tensor([cache.data_ptr() for cache in caches], dtype=torch.int64, device=device),
        torch.tensor(words, dtype=torch.int32, device=device),
        max(words),
        tuple(caches),
    )


def move_paths(rows: CacheRows, target: Tensor, source: Tensor) -> None:
    """Move rows within each cache; slots are not checked.

    Args:
        rows: of :func:`cache_rows`.
        target, source: ``[B, D]`` int64, contiguous, of
            :func:`~frspec_kernels.tree_accept.accept_greedy`. The targets of a request are
            different; two requests have no slot in common, but for moves onto themselves.

    Raises:
        TypeError, ValueError: tensors that do not fit each other.
    """
    for name, tensor in (("target", target), ("source", source)):
        if tensor.dtype != torch.int64:
            raise TypeError(f"{name} is int64, got {tensor.dtype}")
        if tensor.dim() != 2 or tensor.shape != target.shape or not tensor.is_contiguous():
            raise ValueError(
                f"{name} is a contiguous [B, D] like target, {tuple(target.shape)}; got"
                f" {tuple(tensor.shape)} with strides {tensor.stride()}"
            )
    check_devices(rows.addresses.device, target=target, source=source)
    requests, places = target.shape
    if target.numel() == 0:
        return
    padded, block = _tile(places)
    grid = (requests, len(rows.caches), triton.cdiv(rows.widest, block))
    move_paths_kernel[grid](
        rows.addresses, rows.words, target, source, places,
        BLOCK_D=padded, BLOCK=block, num_warps=WARPS, **pdl_options(target.device),
    )  # fmt: skip


def _tile(places: int) -> tuple[int, int]:
    """Places and words of a program."""
    padded = triton.next_power_of_2(places)
    return padded, max(32, min(BLOCK_WORDS, TILE_WORDS // padded))


def compile_specs() -> list[CompileSpec]:
    """Paths of 3 and of 6 drafted steps."""
    pointers = {"addresses_ptr": "*i64:16", "words_ptr": "*i32:16"}
    pointers |= {"target_ptr": "*i64:16", "source_ptr": "*i64:16", "D": "i32"}
    tiles = [_tile(places) for places in (4, 7)]
    return [
        CompileSpec(
            move_paths_kernel,
            pointers,
            {"BLOCK_D": padded, "BLOCK": block, "USE_PDL": False},
            WARPS,
        )
        for padded, block in tiles
    ]
