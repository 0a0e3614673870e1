"""What the norms accept: each check raises with the offending value and what is expected."""

import torch
from torch import Tensor

MAX_WIDTH = 16_384
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def width_of(x: Tensor) -> int:
    """H of ``x`` [B, H], within what one program holds."""
    width = x.shape[-1] if x.dim() == 2 else 0
    if not 0 < width <= MAX_WIDTH:
        raise ValueError(f"expected [rows, 1 to {MAX_WIDTH}], got {tuple(x.shape)}")
    return width


def check_rows(name: str, x: Tensor, rows: int, width: int, device: torch.device) -> None:
    """``x`` is [rows, width], its rows contiguous in themselves."""
    _check_type(name, x, device)
    if x.shape != (rows, width):
        raise ValueError(f"{name} has shape {tuple(x.shape)}, expected {(rows, width)}")
    if x.stride(1) != 1 and x.numel() > rows:
        raise ValueError(f"a row of {name} must be contiguous; its strides are {x.stride()}")


def check_written(name: str, x: Tensor) -> None:
    """The rows of ``x``, which a kernel writes in any order, do not overlap."""
    if x.shape[0] > 1 and x.stride(0) < x.shape[1]:
        raise ValueError(f"rows of {name} share memory: strides {x.stride()}; give it its own rows")


def check_block(block: int, width: int) -> None:
    """A launch configuration's ``block`` holds a row."""
    if block < width:
        raise ValueError(f"config.block is {block}, a row has {width} elements; give at least that")


def check_weight(name: str, weight: Tensor, width: int, device: torch.device) -> None:
    """``weight`` is [width], contiguous."""
    _check_type(name, weight, device)
    if weight.shape != (width,) or not weight.is_contiguous():
        raise ValueError(
            f"{name} has shape {tuple(weight.shape)}, strides {weight.stride()}; "
            f"expected ({width},), contiguous"
        )


def check_token_ids(token_ids: Tensor, rows: int, device: torch.device) -> None:
    """``token_ids`` is [rows], contiguous, int64 or int32."""
    if token_ids.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"token_ids have dtype {token_ids.dtype}, expected int64 or int32")
    if token_ids.shape != (rows,) or not token_ids.is_contiguous():
        raise ValueError(
            f"token_ids have shape {tuple(token_ids.shape)}, strides {token_ids.stride()}; "
            f"expected ({rows},), contiguous"
        )
    if token_ids.device != device:
        raise ValueError(f"token_ids are on {token_ids.device}, expected {device}")


def _check_type(name: str, x: Tensor, device: torch.device) -> None:
    if x.dtype not in DTYPES:
        raise TypeError(f"{name} has dtype {x.dtype}; bfloat16, float16 and float32 are supported")
    if x.device != device:
        raise ValueError(f"{name} is on {x.device}, expected {device}")
