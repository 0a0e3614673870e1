# pyright: reportCallIssue=false, reportArgumentType=false
"""Launch configurations of :mod:`frspec_kernels.reduced_topk`, and its launches."""

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from frspec_kernels.pdl import pdl_options
from frspec_kernels.reduced_topk_args import FinalNorm, HeadInputs, TopK, Workspace, check_is
from frspec_kernels.reduced_topk_kernels import final_norm_kernel, slice_topk_kernel
from frspec_kernels.reduced_topk_merge_kernels import merge_shards_kernel, merge_slices_kernel

NORM_WARPS = 8
MAX_SLICES = 65_535  # the second dimension of a grid


class LaunchConfig(NamedTuple):
    """How the head is cut and streamed.

    Attributes:
        block_v: head rows of a program.
        block_h: hidden elements of a pipeline stage.
        warps, stages: warps of a program; stages of its software pipeline.
    """

    block_v: int
    block_h: int
    warps: int
    stages: int


def check_config(config: LaunchConfig) -> None:
    """Raise for a launch configuration that Triton cannot compile."""
    check_is("config", config, LaunchConfig)
    tiles = config.block_v, config.block_h
    fit = all(is_power_of_2(n) and n >= 16 for n in tiles) and is_power_of_2(config.warps)
    if not fit or config.stages < 1:
        raise ValueError(
            f"{config}: give tiles of 16 or more and warps that are powers of two, and one stage "
            "or more"
        )


# H200, H = 4096, `python -m bench tune --op reduced_topk`; times are in docs/measurements.md.
# A program re-reads hidden for its rows of the head: wide tiles halve that, and narrow ones keep
# every SM busy where the head is small.
ONE_WAVE = LaunchConfig(block_v=64, block_h=128, warps=4, stages=6)
SMALL = LaunchConfig(block_v=64, block_h=128, warps=4, stages=4)
LARGE = LaunchConfig(block_v=128, block_h=128, warps=4, stages=3)
LARGE_MANY_ROWS = LaunchConfig(block_v=128, block_h=128, warps=4, stages=2)
# Two warps: the products then read the narrow weights from shared memory in whole words.
NARROW_ONE_WAVE = LaunchConfig(block_v=32, block_h=512, warps=2, stages=4)
NARROW = LaunchConfig(block_v=64, block_h=256, warps=2, stages=3)
NARROW_MANY_ROWS = LaunchConfig(block_v=128, block_h=128, warps=4, stages=2)


def launch_config(rows: int, vocab: int, itemsize: int) -> LaunchConfig:
    """The configuration for ``rows`` hidden rows on ``vocab`` head rows of ``itemsize`` bytes."""
    if itemsize == 1:
        if rows > 16:
            return NARROW_MANY_ROWS
        return NARROW_ONE_WAVE if vocab <= 8448 else NARROW
    if vocab <= 8448:  # 132 SMs × 64
        return ONE_WAVE if rows <= 16 else SMALL
    if vocab <= 24576:
        return SMALL
    return LARGE if rows <= 16 else LARGE_MANY_ROWS


TABLE_VOCABS = (8192, 16384, 32768)  # one for each row of the table


def shipped_configs() -> list[LaunchConfig]:
    """Every configuration that :func:`launch_config` can return."""
    table = (launch_config(r, v, i) for r in (1, 64) for v in TABLE_VOCABS for i in (1, 2))
    return list(dict.fromkeys(table))


def block_rows(rows: int) -> int:
    """Hidden rows of a program; 16 is the least that the tensor cores take."""
    return min(max(next_power_of_2(rows), 16), 64)


def merge_warps(keys: int) -> int:
    """Warps of a merge of ``keys`` bests: as few as hold them.

    A round over the keys takes a warp 71 instructions; several warps would wait for each other six
    times a round.
    """
    return min(max(keys // 1024, 1), 16)


def merge_chunk(block_v: int, k_pad: int, warps: int) -> int:
    """Scores of each of ``k_pad`` slices that ``warps`` warps hold in registers together."""
    return max(1, min(block_v, 2048 * warps // k_pad))


def next_power_of_2(n: int) -> int:
    """Smallest power of two that is at least ``n``, and at least 1."""
    return 1 << max(n - 1, 0).bit_length()


def is_power_of_2(n: int) -> bool:
    """Whether ``n`` is 1, 2, 4, …"""
    return n > 0 and n & (n - 1) == 0


@cache
def _shared_memory(device: torch.device) -> int:
    """Bytes that a program may use; without a GPU, no limit."""
    if device.type != "cuda":
        return 1 << 30
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin


def fitting_stages(config: LaunchConfig, hidden: Tensor, head: Tensor, block_b: int) -> int:
    """Stages of ``config``, or as many as the device's shared memory holds."""
    stage = config.block_h * (
        config.block_v * head.element_size() + block_b * hidden.element_size()
    )
    return max(1, min(config.stages, _shared_memory(hidden.device) // stage))


def count_parts(config: LaunchConfig, vocab: int) -> int:
    """Slices of the vocabulary."""
    return -(-vocab // config.block_v)


class Slices(NamedTuple):
    """What the pass over the head leaves, views of the workspace."""

    scores: Tensor | None  # [B, P, block_v] float32; None if k is 1
    bests: Tensor  # [B, 2, P] int64


def run_slices(
    inputs: HeadInputs, k: int, workspace: Workspace, config: LaunchConfig | None
) -> Slices:
    """Launch the pass over the head."""
    hidden, head = inputs.hidden, inputs.head
    rows, hidden_size = hidden.shape
    config = config or launch_config(rows, inputs.vocab, head.element_size())
    parts = count_parts(config, inputs.vocab)
    if parts > MAX_SLICES:
        raise ValueError(f"{inputs.vocab} ids are {parts} slices; at most {MAX_SLICES} fit a grid")
    bests = _view("bests", workspace.bests, (rows, 2, parts))
    shape = (rows, parts, config.block_v)
    scores = None if k == 1 else _view("scores", workspace.scores, shape)
    if inputs.norm is not None:
        hidden = _launch_norm(hidden, inputs.norm, workspace)
    block_b = block_rows(rows)
    slice_topk_kernel[(-(-rows // block_b), parts)](
        hidden, head, inputs.head_scale, inputs.row_ids, inputs.token_ids, inputs.temperature,
        scores, bests, rows, inputs.vocab, hidden_size, head.shape[0],
        hidden.stride(0), head.stride(0),
        BLOCK_V=config.block_v, BLOCK_B=block_b, BLOCK_H=config.block_h,
        EVEN_H=hidden_size % config.block_h == 0,
        num_warps=config.warps, num_stages=fitting_stages(config, hidden, head, block_b),
        **pdl_options(hidden.device),
    )  # fmt: skip
    return Slices(scores, bests)


def _view(name: str, scratch: Tensor, shape: tuple[int, int, int]) -> Tensor:
    need = shape[0] * shape[1] * shape[2]
    if scratch.numel() < need:
        raise ValueError(f"workspace.{name} holds {scratch.numel()}, this call needs {need}")
    return scratch[:need].view(shape)


def _launch_norm(hidden: Tensor, norm: FinalNorm, workspace: Workspace) -> Tensor:
    rows, hidden_size = hidden.shape
    if workspace.normed.shape[0] < rows or workspace.normed.shape[1] != hidden_size:
        raise ValueError(
            f"workspace.normed is {tuple(workspace.normed.shape)}, hidden {tuple(hidden.shape)}"
        )
    residual = norm.residual
    final_norm_kernel[(rows,)](
        hidden, residual, norm.weight, workspace.normed, hidden_size, norm.eps,
        hidden.stride(0), 0 if residual is None else residual.stride(0),
        BLOCK_H=next_power_of_2(hidden_size), num_warps=NORM_WARPS, **pdl_options(hidden.device),
    )  # fmt: skip
    return workspace.normed[:rows]


def run_slice_merge(
    inputs: HeadInputs,
    slices: Slices,
    k: int,
    out: TopK | None,
    merged: Tensor | None,
    *,
    log_probs: bool = False,
) -> None:
    """Launch the merge of each row's slices into ``out``, or into ``merged`` [B, k + 1]."""
    scores, bests = slices
    rows, _, parts = bests.shape
    block_p, k_pad = next_power_of_2(parts), next_power_of_2(k)
    block_v = 1 if scores is None else scores.shape[2]
    probs, token_ids, lse = out or (None, None, None)
    warps = merge_warps(block_p)
    merge_slices_kernel[(rows,)](
        scores, bests, inputs.token_ids, probs, token_ids, lse, merged, inputs.vocab, parts, k,
        K=k, K_PAD=k_pad, BLOCK_P=block_p, BLOCK_V=block_v,
        BLOCK_C=merge_chunk(block_v, k_pad, warps), LOG_PROBS=log_probs,
        num_warps=warps, **pdl_options(bests.device),
    )  # fmt: skip


def run_shard_merge(states: Tensor, out: TopK, *, log_probs: bool) -> None:
    """Launch the merge of ``states`` [S, B, k + 1] into ``out``."""
    shards, rows, k = states.shape[0], states.shape[1], states.shape[2] - 1
    block_n = next_power_of_2(shards * k)
    merge_shards_kernel[(rows,)](
        states, *out, shards, k,
        K=k, K_PAD=next_power_of_2(k), BLOCK_S=next_power_of_2(shards), BLOCK_N=block_n,
        LOG_PROBS=log_probs, num_warps=merge_warps(block_n), **pdl_options(states.device),
    )  # fmt: skip
