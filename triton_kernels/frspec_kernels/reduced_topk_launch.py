# pyright: reportCallIssue=false, reportArgumentType=false
"""Launch configurations of :mod:`frspec_kernels.reduced_topk`, and its launches."""

from typing import NamedTuple

from torch import Tensor

from frspec_kernels.compile_spec import CompileSpec
from frspec_kernels.pdl import pdl_options
from frspec_kernels.reduced_topk_args import FinalNorm, HeadInputs, TopK, Workspace
from frspec_kernels.reduced_topk_kernels import (
    final_norm_kernel,
    merge_topk_kernel,
    slice_topk_kernel,
)

FINISH_ROWS = 16  # of hidden, for which a program keeps all keys in registers at once
NORM_WARPS = 8


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


DEFAULT = LaunchConfig(block_v=64, block_h=128, warps=4, stages=4)


def launch_config(rows: int, vocab: int, itemsize: int) -> LaunchConfig:
    """The configuration for ``rows`` hidden rows on ``vocab`` head rows of ``itemsize`` bytes."""
    return DEFAULT


def shipped_configs() -> list[LaunchConfig]:
    """Every configuration that :func:`launch_config` can return."""
    return [DEFAULT]


def block_rows(rows: int) -> int:
    """Hidden rows of a program; 16 is the least that the tensor cores take."""
    return min(max(next_power_of_2(rows), 16), 64)


def merge_warps(block_p: int) -> int:
    """Warps that merge ``block_p`` slices."""
    return 4 if block_p <= 1024 else 8


def next_power_of_2(n: int) -> int:
    """Smallest power of two that is at least ``n``, and at least 1."""
    return 1 << max(n - 1, 0).bit_length()


def count_parts(config: LaunchConfig, vocab: int) -> int:
    """Slices of the vocabulary."""
    return -(-vocab // config.block_v)


def slice_states(
    inputs: HeadInputs, k: int, workspace: Workspace, config: LaunchConfig | None
) -> Tensor:
    """Launch the pass over the head: states [B, k + 1, P] in the workspace."""
    hidden, head = inputs.hidden, inputs.head
    rows, hidden_size = hidden.shape
    config = config or launch_config(rows, inputs.vocab, head.element_size())
    parts = count_parts(config, inputs.vocab)
    state = _view(workspace.state, (rows, k + 1, parts))
    if inputs.norm is not None:
        hidden = _launch_norm(hidden, inputs.norm, workspace)
    block_b = block_rows(rows)
    slice_topk_kernel[(-(-rows // block_b), parts)](
        hidden, head, inputs.head_scale, inputs.row_ids, inputs.token_ids, inputs.temperature,
        state, rows, inputs.vocab, hidden_size, hidden.stride(0), head.stride(0),
        K=k, BLOCK_V=config.block_v, BLOCK_B=block_b, BLOCK_H=config.block_h, COLUMNS=FINISH_ROWS,
        EVEN_H=hidden_size % config.block_h == 0,
        num_warps=config.warps, num_stages=config.stages, **pdl_options(hidden.device),
    )  # fmt: skip
    return state


def _view(scratch: Tensor, shape: tuple[int, int, int]) -> Tensor:
    need = shape[0] * shape[1] * shape[2]
    if scratch.numel() < need:
        raise ValueError(f"the workspace holds {scratch.numel()} int64, this call needs {need}")
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


def merge_states(
    states: Tensor,  # [B, k + 1, P]
    out: TopK | None,
    merged: Tensor | None,
    *,
    log_probs: bool = False,
) -> None:
    """Launch the merge of each row's P states into ``out`` and into ``merged`` [B, k + 1]."""
    k, parts = states.shape[1] - 1, states.shape[2]
    block_p = next_power_of_2(parts)
    probs, token_ids, lse = out or (None, None, None)
    merge_topk_kernel[(states.shape[0],)](
        states, probs, token_ids, lse, merged, parts, *states.stride(),
        K=k, K_PAD=next_power_of_2(k), BLOCK_P=block_p, LOG_PROBS=log_probs,
        num_warps=merge_warps(block_p), **pdl_options(states.device),
    )  # fmt: skip


def compile_specs() -> list[CompileSpec]:
    """The kernels in every shipped configuration, as SGLang calls them: dense rows, H by 128."""
    specs = [_slice_spec(config, "bf16", "bf16", 10, 16) for config in shipped_configs()]
    for head in ("fp8e4nv", "i8"):
        specs += [_slice_spec(config, "bf16", head, 10, 16) for config in shipped_configs()]
    specs += [_slice_spec(DEFAULT, "fp16", "fp16", k, rows) for k in (1, 64) for rows in (16, 64)]
    specs += [_merge_spec(k, parts) for k in (1, 10, 64) for parts in (128, 512, 2048)]
    return [*specs, *(_norm_spec(block) for block in (2048, 4096, 8192))]


def _slice_spec(config: LaunchConfig, hidden: str, head: str, k: int, block_b: int) -> CompileSpec:
    narrow = hidden != head
    signature = {
        "hidden_ptr": f"*{hidden}:16",
        "head_ptr": f"*{head}:16",
        "token_ids_ptr": "*i64:16",
        "state_ptr": "*i64:16",
        **dict.fromkeys(("B", "V"), "i32"),
        **dict.fromkeys(("H", "stride_hidden_row", "stride_head_row"), "i32:16"),
    }
    absent: dict[str, None] = {"row_ids_ptr": None, "temperature_ptr": None}
    if narrow:
        signature["head_scale_ptr"] = "*fp32:16"
    else:
        absent["head_scale_ptr"] = None
    constexprs = {
        "K": k, "BLOCK_V": config.block_v, "BLOCK_B": block_b, "BLOCK_H": config.block_h,
        "COLUMNS": FINISH_ROWS, "EVEN_H": True, "USE_PDL": False,
    }  # fmt: skip
    return CompileSpec(
        slice_topk_kernel, signature, constexprs | absent, config.warps, config.stages
    )


def _merge_spec(k: int, parts: int) -> CompileSpec:
    signature = {
        "state_ptr": "*i64:16",
        "probs_ptr": "*fp32:16",
        "token_ids_ptr": "*i64:16",
        "lse_ptr": "*fp32:16",
        **dict.fromkeys(("parts", "stride_state_row", "stride_state_slot"), "i32"),
    }
    constexprs = {
        "merged_ptr": None, "stride_state_part": 1, "K": k, "K_PAD": next_power_of_2(k),
        "BLOCK_P": parts, "LOG_PROBS": False, "USE_PDL": False,
    }  # fmt: skip
    return CompileSpec(merge_topk_kernel, signature, constexprs, merge_warps(parts))


def _norm_spec(block_h: int) -> CompileSpec:
    pointers = ("hidden_ptr", "residual_ptr", "weight_ptr", "normed_ptr")
    signature = {
        **dict.fromkeys(pointers, "*bf16:16"),
        **dict.fromkeys(("H", "stride_hidden_row", "stride_residual_row"), "i32:16"),
        "eps": "fp32",
    }
    constexprs = {"BLOCK_H": block_h, "USE_PDL": False}
    return CompileSpec(final_norm_kernel, signature, constexprs, NORM_WARPS)
