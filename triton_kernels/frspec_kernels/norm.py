# pyright: reportCallIssue=false, reportArgumentType=false
"""RMSNorm, alone or fused with what stands beside it in a decoder and in front of a draft.

    y = x · rsqrt(mean(x²) + eps) · w            (Zhang and Sennrich, arXiv:1910.07467)

with (1 + w) for w in Gemma's models. ``rms_norm`` normalises; ``add_rms_norm`` adds a residual
first, both in place; ``dual_norm_concat`` makes the input of an EAGLE-3 draft
(arXiv:2503.01840): the norm of a token's embedding beside the norm of a hidden state.

Letters: B rows, H width of a row, V rows of the embedding.

Numerics: squares, mean, scale and product in fp32, one rounding to the output's type. The residual
sum is fp32 too: it is rounded where it is stored, and what gets normalised is the sum *before*
that rounding, as in flashinfer's and sgl_kernel's ``fused_add_rmsnorm`` and SGLang's PyTorch path
(vLLM's CUDA kernel normalises the rounded sum). NaN and infinity come out as in PyTorch. Graph-safe
when ``out`` is given: no synchronisation, no allocation.
"""

import torch
from torch import Tensor

from . import norm_kernels as kernels
from .norm_args import (
    check_apart,
    check_config,
    check_eps,
    check_rows,
    check_token_ids,
    check_weight,
    check_written,
    shape_of,
)
from .norm_launch import LaunchConfig, compile_specs, launch_config
from .pdl import pdl_options

__all__ = [
    "LaunchConfig",
    "add_rms_norm",
    "add_rms_norm_reference",
    "compile_specs",
    "dual_norm_concat",
    "dual_norm_concat_reference",
    "launch_config",
    "rms_norm",
    "rms_norm_reference",
]


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float, *, gemma: bool = False) -> Tensor:
    """:func:`rms_norm` in PyTorch: fp32 arithmetic (fp64 for fp64 inputs), one rounding."""
    wide = torch.promote_types(x.dtype, torch.float32)
    scale = torch.rsqrt(x.to(wide).square().mean(-1, keepdim=True) + eps)
    return (x.to(wide) * scale * (weight.to(wide) + int(gemma))).to(x.dtype)


def add_rms_norm_reference(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, gemma: bool = False
) -> tuple[Tensor, Tensor]:
    """:func:`add_rms_norm` in PyTorch, not in place: (normalised sum, sum)."""
    wide = torch.promote_types(x.dtype, torch.float32)
    total = x.to(wide) + residual.to(wide)
    return rms_norm_reference(total, weight, eps, gemma=gemma).to(x.dtype), total.to(residual.dtype)


def dual_norm_concat_reference(
    token_ids: Tensor,
    embedding: Tensor,
    hidden: Tensor,
    embed_weight: Tensor,
    hidden_weight: Tensor,
    eps: float,
) -> Tensor:
    """:func:`dual_norm_concat` in PyTorch."""
    embedded = rms_norm_reference(embedding[token_ids], embed_weight, eps)
    return torch.cat([embedded, rms_norm_reference(hidden, hidden_weight, eps)], dim=-1)


def rms_norm(
    x: Tensor,
    weight: Tensor,
    eps: float,
    *,
    out: Tensor | None = None,
    gemma: bool = False,
    config: LaunchConfig | None = None,
) -> Tensor:
    """RMSNorm of each row.

    Args:
        x: [B, H], bf16, fp16 or fp32; rows may be strided. H up to 16,384, B may be 0.
        weight: [H], any of these types.
        eps: added to the mean square.
        out: [B, H], written if given: ``x`` itself, or memory apart from it.
        gemma: scale by 1 + weight.
        config: launch configuration, the table's by default.

    Returns:
        [B, H] in the type of ``x`` (of ``out`` if given).

    Raises:
        ValueError: a shape, stride, device or ``eps`` that does not fit, or memory that overlaps.
        TypeError: a dtype outside those above.
    """
    rows, width = shape_of("x", x)
    check_eps(eps)
    check_rows("x", x, rows, width, x.device)
    check_weight("weight", weight, width, x.device)
    if out is None:
        out = x.new_empty(rows, width)
    check_rows("out", out, rows, width, x.device)
    check_written("out", out)
    if rows:
        check_apart("out", out, "x", x, in_place=True)
        block, num_warps = config or launch_config(rows, width)
        check_config(block, num_warps, width)
        kernels.rms_norm_kernel[(rows,)](
            x, weight, out, x.stride(0), out.stride(0), width, eps,
            GEMMA=gemma, BLOCK=block, num_warps=num_warps, **pdl_options(x.device),
        )  # fmt: skip
    return out


def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    *,
    gemma: bool = False,
    config: LaunchConfig | None = None,
) -> None:
    """In place: ``residual += x``, then ``x = rms_norm(residual)`` of the sum before its rounding.

    Args:
        x: [B, H], bf16, fp16 or fp32; rows may be strided. H up to 16,384, B may be 0.
        residual: [B, H], any of these types, in memory apart from ``x``.
        weight, eps, gemma, config: as in :func:`rms_norm`.

    Raises:
        ValueError: a shape, stride, device or ``eps`` that does not fit, or memory that overlaps.
        TypeError: a dtype outside those above.
    """
    rows, width = shape_of("x", x)
    check_eps(eps)
    check_rows("x", x, rows, width, x.device)
    check_rows("residual", residual, rows, width, x.device)
    check_weight("weight", weight, width, x.device)
    check_written("x", x)
    check_written("residual", residual)
    if rows:
        check_apart("x", x, "residual", residual)
        block, num_warps = config or launch_config(rows, width)
        check_config(block, num_warps, width)
        kernels.add_rms_norm_kernel[(rows,)](
            x, residual, weight, x.stride(0), residual.stride(0), width, eps,
            GEMMA=gemma, BLOCK=block, num_warps=num_warps, **pdl_options(x.device),
        )  # fmt: skip


def dual_norm_concat(
    token_ids: Tensor,
    embedding: Tensor,
    hidden: Tensor,
    embed_weight: Tensor,
    hidden_weight: Tensor,
    eps: float,
    *,
    out: Tensor | None = None,
    config: LaunchConfig | None = None,
) -> Tensor:
    """The input of an EAGLE-3 draft: ``[rms_norm(embedding[token_ids]), rms_norm(hidden)]``.

    Args:
        token_ids: [B], int64 or int32, contiguous. An id outside [0, V) gives NaN in the
            embedding's half of its row; ids are not checked, that would synchronise with the host.
        embedding: [V, H], bf16, fp16 or fp32; rows may be strided.
        hidden: [B, H], any of these types; rows may be strided. H up to 16,384, B may be 0.
        embed_weight, hidden_weight: [H].
        eps: added to the mean squares.
        out: [B, 2H], written if given, in memory apart from the others.
        config: launch configuration, the table's by default.

    Returns:
        [B, 2H] in the type of ``hidden`` (of ``out`` if given).

    Raises:
        ValueError: a shape, stride, device or ``eps`` that does not fit, or memory that overlaps.
        TypeError: a dtype outside those above.
    """
    (rows, width), device = shape_of("hidden", hidden), hidden.device
    check_eps(eps)
    check_rows("hidden", hidden, rows, width, device)
    check_rows("embedding", embedding, shape_of("embedding", embedding)[0], width, device)
    check_weight("embed_weight", embed_weight, width, device)
    check_weight("hidden_weight", hidden_weight, width, device)
    check_token_ids(token_ids, rows, device)
    if out is None:
        out = hidden.new_empty(rows, 2 * width)
    check_rows("out", out, rows, 2 * width, device)
    check_written("out", out)
    if rows and not embedding.shape[0]:
        raise ValueError("embedding has no rows; it needs at least one")
    if rows:
        check_apart("out", out, "hidden", hidden)
        check_apart("out", out, "embedding", embedding)
        block, num_warps = config or launch_config(2 * rows, width)
        check_config(block, num_warps, width)
        kernels.dual_norm_concat_kernel[(rows, 2)](
            token_ids, embedding, hidden, embed_weight, hidden_weight, out,
            embedding.stride(0), hidden.stride(0), out.stride(0), embedding.shape[0], width, eps,
            BLOCK=block, num_warps=num_warps, **pdl_options(device),
        )  # fmt: skip
    return out
