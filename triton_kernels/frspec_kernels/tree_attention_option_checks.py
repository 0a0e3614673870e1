"""What tree attention refuses of options, outputs and scratch; the rest of
:mod:`frspec_kernels.tree_attention_checks`.
"""

from math import isfinite
from numbers import Real

import torch
from torch import Tensor

from frspec_kernels.devices import check_devices
from frspec_kernels.tree_attention_inputs import (
    AttentionShape,
    DraftTree,
    TreeAttentionWorkspace,
)

SINK_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SCALES = (2.0**-32, 2.0**32)  # products of two stay far inside float32
MAX_LOGIT_CAP = 1000.0  # tanh comes from a sigmoid: it is off by 1e-7 of the cap
MAX_WINDOW = 2**31 - 1


def check_number(name: str, value: object) -> None:
    """A number on the host.

    Raises:
        TypeError: anything else, such as a tensor.
    """
    if not isinstance(value, Real):
        raise TypeError(
            f"{name} is a number on the host, got {type(value).__name__}; read a tensor once, when "
            "the model is loaded"
        )


def check_scale(name: str, value: float, remedy: str) -> None:
    """A factor that float32 products can take.

    Raises:
        TypeError: not a number.
        ValueError: NaN, infinite, zero, negative or far out of range.
    """
    check_number(name, value)
    if not (isfinite(value) and SCALES[0] <= value <= SCALES[1]):
        raise ValueError(f"{name} is in [{SCALES[0]:.1e}, {SCALES[1]:.1e}], got {value}; {remedy}")


def check_options(tree: DraftTree, sm_scale: float, logit_cap: float, window_left: int) -> None:
    """The options that are numbers.

    Raises:
        TypeError: one is not a number, such as a tensor.
        ValueError: one is NaN, infinite or out of range; a window without depths.
    """
    check_scale("sm_scale", sm_scale, "fold other factors into q")
    check_number("logit_cap", logit_cap)
    if not 0 <= logit_cap <= MAX_LOGIT_CAP:
        raise ValueError(
            f"logit_cap is in [0, {MAX_LOGIT_CAP:g}], 0 for none, got {logit_cap}; logits that a "
            "higher one would change are rare: give 0"
        )
    if 0 < logit_cap < SCALES[0]:
        raise ValueError(f"logit_cap is {logit_cap}: every logit would be 0; give 0 for no cap")
    if not isinstance(window_left, int):
        raise TypeError(f"window_left is an int, got {type(window_left).__name__}")
    if not -1 <= window_left <= MAX_WINDOW:
        raise ValueError(f"window_left is in [-1, {MAX_WINDOW}], -1 for all, got {window_left}")
    if window_left >= 0 and tree.depths is None:
        raise ValueError(f"window_left={window_left} needs the tree's depths")
    if window_left >= 0 and tree.key_indptr is not None and tree.key_depths is None:
        raise ValueError("a sliding window over keys of their own key_indptr needs key_depths")


def check_outputs(
    q: Tensor, sizes: AttentionShape, out: Tensor, lse: Tensor | None, sinks: Tensor | None
) -> None:
    """Where the results go, and the sinks.

    Raises:
        TypeError: another dtype.
        ValueError: another shape or device, strides that the kernels do not follow.
    """
    expected = (q.shape[0], sizes.q_heads, sizes.head_dim_v)
    if out.dtype != q.dtype:
        raise TypeError(f"out is {q.dtype} like q, got {out.dtype}")
    if tuple(out.shape) != expected or (out.numel() and not _writes_apart(out, expected[2])):
        raise ValueError(
            f"out is {list(expected)} with contiguous rows apart from each other, got "
            f"{list(out.shape)} with strides {list(out.stride())}"
        )
    check_devices(q.device, out=out, lse=lse, sinks=sinks)
    if lse is not None:
        if lse.dtype != torch.float32:
            raise TypeError(f"lse is float32, got {lse.dtype}")
        if tuple(lse.shape) != expected[:2] or (
            lse.numel() and not _writes_apart(lse, expected[1])
        ):
            raise ValueError(
                f"lse is {list(expected[:2])} with contiguous rows apart from each other, got "
                f"{list(lse.shape)} with strides {list(lse.stride())}"
            )
    if sinks is not None:
        if sinks.dtype not in SINK_DTYPES:
            raise TypeError(f"sinks are float32, bf16 or fp16, got {sinks.dtype}; convert them")
        if tuple(sinks.shape) != (sizes.q_heads,) or not sinks.is_contiguous():
            raise ValueError(
                f"sinks are contiguous [{sizes.q_heads}], one a query head, got "
                f"{list(sinks.shape)} with strides {list(sinks.stride())}"
            )


def check_workspace(
    workspace: TreeAttentionWorkspace, rows: int, sizes: AttentionShape, device: torch.device
) -> None:
    """Scratch for ``rows`` rows of partial results.

    Raises:
        TypeError: not float32.
        ValueError: too small, not contiguous, on another device.
    """
    remedy = "make it with tree_attention_workspace for the largest batch and node count"
    out, lse = workspace.part_out, workspace.part_lse
    check_devices(device, **{"workspace.part_out": out, "workspace.part_lse": lse})
    if out.dtype != torch.float32 or lse.dtype != torch.float32:
        raise TypeError(f"the workspace is float32, got {out.dtype}, {lse.dtype}; {remedy}")
    if not (out.is_contiguous() and lse.is_contiguous()):
        raise ValueError(
            f"the workspace is contiguous, got strides {out.stride()}, {lse.stride()}; {remedy}"
        )
    fits = out.dim() == 2 and lse.dim() == 1 and out.shape[1] == sizes.head_dim_v
    if not fits or min(out.shape[0], lse.shape[0]) < rows:
        raise ValueError(
            f"workspace {tuple(out.shape)}, {tuple(lse.shape)} is too small for "
            f"{(rows, sizes.head_dim_v)}, {(rows,)}; {remedy}"
        )


def _writes_apart(tensor: Tensor, row: int) -> bool:
    """Contiguous rows of ``row`` values, none of them over another."""
    strides = [s for s, n in zip(tensor.stride()[:-1], tensor.shape, strict=False) if n > 1]
    return (tensor.stride(-1) == 1 or row == 1) and min(strides, default=row) >= row
