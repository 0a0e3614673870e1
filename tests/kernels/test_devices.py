"""The checks that all kernels share."""

import pytest
import torch

from frspec_kernels.devices import check_devices, check_is_tensor

CPU = torch.device("cpu")


def test_tensors_of_one_device_pass():
    check_devices(CPU, x=torch.ones(1), y=None)


def test_a_tensor_elsewhere_is_named():
    with pytest.raises(ValueError, match="y is on meta; move it to cpu"):
        check_devices(CPU, x=torch.ones(1), y=torch.ones(1, device="meta"))


def test_a_gpu_that_is_not_the_current_one_is_refused(monkeypatch):
    """Triton would launch on the current one."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    check_devices(torch.device("cuda", 0))
    with pytest.raises(ValueError, match=r"on cuda:1, the current device is 0; .*device\(1\)"):
        check_devices(torch.device("cuda", 1))


def test_what_is_no_tensor_is_named():
    check_is_tensor("x", torch.ones(1))
    with pytest.raises(TypeError, match=r"x is a list; give a torch\.Tensor"):
        check_is_tensor("x", [1.0])
