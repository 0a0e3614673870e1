# ruff: noqa: ANN001, ANN201, ANN202 (values inside a kernel have no Python types)
# pyright: reportArgumentType=false
"""Kernels of the norms: one program a row, the whole row in registers. See ``norm.py``."""

import triton
import triton.language as tl

from .pdl import wait_for_previous


@triton.jit
def _normalise(x, weight, width, eps, GEMMA: tl.constexpr):
    """``x`` [BLOCK] fp32, zero beyond ``width``."""
    weight = weight.to(tl.float32)
    if GEMMA:
        weight += 1.0
    return x * tl.rsqrt(tl.sum(x * x, axis=0) / width + eps) * weight


@triton.jit
def rms_norm_kernel(
    x_ptr,  # [B, H]
    weight_ptr,  # [H]
    out_ptr,  # [B, H]
    stride_x,
    stride_out,
    width,
    eps,
    GEMMA: tl.constexpr,
    BLOCK: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """Program ``row``: one row of ``rms_norm``."""
    row = tl.program_id(0).to(tl.int64)
    offs = tl.arange(0, BLOCK)
    mask = offs < width
    wait_for_previous(USE_PDL)
    x = tl.load(x_ptr + row * stride_x + offs, mask=mask, other=0.0).to(tl.float32)
    # Before the sum: both loads are under way together, one memory latency instead of two.
    weight = tl.load(weight_ptr + offs, mask=mask, other=0.0)
    y = _normalise(x, weight, width, eps, GEMMA)
    tl.store(out_ptr + row * stride_out + offs, y.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def add_rms_norm_kernel(
    x_ptr,  # [B, H], normalised in place
    residual_ptr,  # [B, H], summed in place
    weight_ptr,  # [H]
    stride_x,
    stride_residual,
    width,
    eps,
    GEMMA: tl.constexpr,
    BLOCK: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """Program ``row``: one row of ``add_rms_norm``, both tensors in place."""
    row = tl.program_id(0).to(tl.int64)
    offs = tl.arange(0, BLOCK)
    mask = offs < width
    x_row, residual_row = x_ptr + row * stride_x, residual_ptr + row * stride_residual
    wait_for_previous(USE_PDL)
    x = tl.load(x_row + offs, mask=mask, other=0.0).to(tl.float32)
    x += tl.load(residual_row + offs, mask=mask, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + offs, mask=mask, other=0.0)
    tl.store(residual_row + offs, x.to(residual_ptr.dtype.element_ty), mask=mask)
    y = _normalise(x, weight, width, eps, GEMMA)
    tl.store(x_row + offs, y.to(x_ptr.dtype.element_ty), mask=mask)


@triton.jit
def dual_norm_concat_kernel(
    token_ids_ptr,  # [B]
    embedding_ptr,  # [V, H]
    hidden_ptr,  # [B, H]
    embed_weight_ptr,  # [H]
    hidden_weight_ptr,  # [H]
    out_ptr,  # [B, 2H]
    stride_embedding,
    stride_hidden,
    stride_out,
    vocab_size,
    width,
    eps,
    BLOCK: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """Program ``(row, half)``: one half of a row of ``dual_norm_concat``."""
    row = tl.program_id(0).to(tl.int64)
    half = tl.program_id(1)  # 0: the embedding's, 1: the hidden state's
    offs = tl.arange(0, BLOCK)
    mask = offs < width
    wait_for_previous(USE_PDL)
    if half == 0:
        weight = tl.load(embed_weight_ptr + offs, mask=mask, other=0.0).to(tl.float32)
        token_id = tl.load(token_ids_ptr + row).to(tl.int64)
        known = (token_id >= 0) & (token_id < vocab_size)
        source = embedding_ptr + tl.where(known, token_id, 0) * stride_embedding
        x = tl.load(source + offs, mask=mask, other=0.0).to(tl.float32)
        x = tl.where(known, x, float("nan"))
    else:
        weight = tl.load(hidden_weight_ptr + offs, mask=mask, other=0.0).to(tl.float32)
        x = tl.load(hidden_ptr + row * stride_hidden + offs, mask=mask, other=0.0).to(tl.float32)
    y = _normalise(x, weight, width, eps, False).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * stride_out + half * width + offs, y, mask=mask)
