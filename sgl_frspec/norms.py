"""RMSNorms of a model on :mod:`frspec_kernels.norm`, in place of SGLang's kernels."""

from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.layers.layernorm import Gemma3RMSNorm, RMSNorm

from frspec_kernels.norm import add_rms_norm, rms_norm
from sgl_frspec.options import Options

MAX_WIDTH = 16_384  # of the kernels
_KERNEL_DTYPES = (torch.bfloat16, torch.float16)


def models_on_our_norms(options: Options, *, deterministic: bool) -> list[str]:
    """Which of "draft" and "target" run their norms on our kernels.

    Our launches follow the batch, and with them the rounding of sums. Under ``deterministic``
    inference the draft keeps SGLang's, so that a seeded request draws the same in any batch.
    """
    draft = ["draft"] if options.uses("norms") and not deterministic else []
    return draft + (["target"] if options.target_norms else [])


def install_norms(model: torch.nn.Module) -> int:
    """Let the plain RMSNorms of ``model`` run on our kernels; returns how many do.

    Variants that normalise otherwise stay SGLang's, and so do inputs that the kernels lack: see
    :func:`takes`. Gemma 3's do too, except for queries and keys: these have a dimension of heads,
    for which SGLang has ten PyTorch operations and no kernel.
    """
    norms = [m for m in model.modules() if type(m) is RMSNorm and is_plain(m)]
    for norm in norms:
        norm.forward = kernel_forward(norm, norm.forward)
    gemma = [m for m in model.modules() if type(m) is Gemma3RMSNorm]
    for norm in gemma:
        norm.forward = head_forward(norm, norm.forward)
    return len(norms) + len(gemma)


def is_plain(norm: Any) -> bool:
    """Whether ``norm`` scales by its weight and rounds once, over the whole row."""
    return (
        norm.has_weight
        and norm.variance_size_override is None
        and not norm.cast_x_before_out_mul
        and not norm.fp32_residual
        and norm.override_orig_dtype is None
        and getattr(norm, "_quant_linear", None) is None
        and norm.hidden_size <= MAX_WIDTH
    )


def takes(x: torch.Tensor, residual: torch.Tensor | None, others: tuple[Any, ...]) -> bool:
    """Whether the kernels take a call: rows on a GPU, and nothing besides a residual."""
    return (
        x.is_cuda
        and x.dim() == 2
        and x.numel() > 0
        and x.stride(-1) == 1
        and x.dtype in _KERNEL_DTYPES
        and (residual is None or (residual.dim() == 2 and residual.stride(-1) == 1))
        and all(other is None for other in others)
    )


def kernel_forward(norm: Any, stock: Callable[..., Any]) -> Callable[..., Any]:
    """``norm``'s forward pass: on our kernel where it takes the call, else ``stock``."""

    def forward(x: Any, residual: Any = None, *others: Any, **named: Any) -> Any:
        if not takes(x, residual, (*others, *named.values())):
            return stock(x, residual, *others, **named)
        if residual is None:
            return rms_norm(x, norm.weight, norm.variance_epsilon)
        # In place, as SGLang's own: the caller goes on with both.
        add_rms_norm(x, residual, norm.weight, norm.variance_epsilon)
        return x, residual

    return forward


def takes_heads(x: torch.Tensor, residual: torch.Tensor | None) -> bool:
    """Whether the kernel takes a Gemma 3 norm's call for each head: on a GPU, no residual."""
    return (
        residual is None
        and x.is_cuda
        and x.dim() in (3, 4)
        and x.numel() > 0
        and x.stride(-1) == 1
        and x.shape[-1] <= MAX_WIDTH
        and x.dtype in _KERNEL_DTYPES
    )


def head_forward(norm: Any, stock: Callable[..., Any]) -> Callable[..., Any]:
    """``norm``'s forward pass: on our kernel where ``x`` has heads, else ``stock``.

    ``x`` is [tokens, heads, width], or in older releases [1, heads, tokens, width], a view whose
    tokens lie apart. The result lies in memory as SGLang's does: head beside head.
    """

    def forward(x: Any, residual: Any = None) -> Any:
        if not takes_heads(x, residual):
            return stock(x, residual)
        by_token = x.transpose(1, 2) if x.dim() == 4 else x
        rows = by_token.reshape(-1, x.shape[-1])
        out = rms_norm(rows, norm.weight, norm.eps, gemma=True).view(by_token.shape)
        return out.transpose(1, 2) if x.dim() == 4 else out

    return forward
