"""The device of a call's tensors."""

import torch
from torch import Tensor


def check_devices(device: torch.device, **tensors: Tensor | None) -> None:
    """All tensors of a call are on one device.

    Raises:
        ValueError: one is elsewhere.
    """
    for name, tensor in tensors.items():
        if tensor is not None and tensor.device != device:
            raise ValueError(f"{name} is on {tensor.device}; move it to {device}")
