"""The device of a call's tensors, and that they are tensors at all."""

from typing import Any

import torch
from torch import Tensor


def check_is_tensor(name: str, value: Any) -> None:
    """Raise ``TypeError`` for a list, a NumPy array or None."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} is a {type(value).__name__}; give a torch.Tensor")


def check_devices(device: torch.device, **tensors: Tensor | None) -> None:
    """All tensors of a call are on one device, the current one if it is a GPU.

    Triton launches on the current device: a kernel there cannot read another GPU's memory, or reads
    it before the stream that writes it is done.

    Raises:
        ValueError: one is elsewhere.
    """
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        raise ValueError(
            f"the tensors are on {device}, the current device is {torch.cuda.current_device()}; "
            f"call it under torch.cuda.device({device.index})"
        )
    for name, tensor in tensors.items():
        if tensor is not None and tensor.device != device:
            raise ValueError(f"{name} is on {tensor.device}; move it to {device}")
