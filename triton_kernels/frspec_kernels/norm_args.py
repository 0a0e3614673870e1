"""What the norms accept: each check raises with the offending value and what is expected."""

import torch
from torch import Tensor

from .devices import check_devices, check_is_tensor

MAX_WIDTH = 16_384
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def shape_of(name: str, x: Tensor) -> tuple[int, int]:
    """B and H of ``x`` [B, H], H within what one program holds."""
    check_is_tensor(name, x)
    if x.dim() != 2 or not 0 < x.shape[1] <= MAX_WIDTH:
        raise ValueError(f"{name} is {tuple(x.shape)}, expected [rows, 1 to {MAX_WIDTH}]")
    return x.shape[0], x.shape[1]


def check_eps(eps: float) -> None:
    """``eps`` is a number that keeps the root real."""
    if not isinstance(eps, int | float):
        raise TypeError(f"eps is {eps!r}; give a Python number, 1e-5 say")
    if not eps >= 0:
        raise ValueError(f"eps is {eps}; give 0 or more")


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


def check_apart(
    name: str, out: Tensor, other_name: str, other: Tensor, *, in_place: bool = False
) -> None:
    """Writing a row of ``out`` changes no row of ``other`` that another program reads.

    They may stand beside each other in one buffer; with ``in_place`` they may be the same rows.
    """
    if torch.compiler.is_compiling():  # no addresses while torch.compile traces
        return
    start, other_start = out.data_ptr(), other.data_ptr()
    pitch, row = out.stride(0) * out.itemsize, out.shape[1] * out.itemsize
    other_pitch, other_row = other.stride(0) * other.itemsize, other.shape[1] * other.itemsize
    end = start + (out.shape[0] - 1) * pitch + row
    other_end = other_start + (other.shape[0] - 1) * other_pitch + other_row
    if end <= other_start or other_end <= start:
        return
    single = out.shape[0] == other.shape[0] == 1
    if in_place and start == other_start and row == other_row and (single or pitch == other_pitch):
        return
    beside = (other_start - start) % pitch if pitch == other_pitch and pitch > 0 else 0
    if beside < row or beside + other_row > pitch:
        raise ValueError(f"{name} and {other_name} overlap in memory; give {name} its own")


def check_config(block: int, num_warps: int, width: int) -> None:
    """A launch configuration's ``block`` holds a row; Triton takes powers of two."""
    if block < width:
        raise ValueError(f"config.block is {block}, a row has {width} elements; give at least that")
    if block & (block - 1) or num_warps < 1 or num_warps & (num_warps - 1):
        raise ValueError(f"config is ({block}, {num_warps}); give powers of two")


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
    check_is_tensor("token_ids", token_ids)
    if token_ids.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"token_ids have dtype {token_ids.dtype}, expected int64 or int32")
    if token_ids.shape != (rows,) or not token_ids.is_contiguous():
        raise ValueError(
            f"token_ids have shape {tuple(token_ids.shape)}, strides {token_ids.stride()}; "
            f"expected ({rows},), contiguous"
        )
    check_devices(device, token_ids=token_ids)


def _check_type(name: str, x: Tensor, device: torch.device) -> None:
    check_is_tensor(name, x)
    if x.dtype not in DTYPES:
        raise TypeError(f"{name} has dtype {x.dtype}; bfloat16, float16 and float32 are supported")
    check_devices(device, **{name: x})
