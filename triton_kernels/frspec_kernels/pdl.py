# ruff: noqa: ANN201 (values inside a kernel have no Python types)
"""Programmatic dependent launch: a kernel starts while the one before it still drains.

On NVIDIA GPUs from compute capability 9.0. A kernel that is launched so reads and writes nothing
before :func:`wait_for_previous`, which returns when the kernel before it has finished and its
stores are visible. Between kernels of one CUDA graph this hides most of a launch, about 1 µs.
"""

from functools import cache

import torch
import triton
import triton.language as tl
import triton.language.extra.cuda as tl_cuda


@triton.jit
def wait_for_previous(USE_PDL: tl.constexpr):
    """Let the next kernel start its blocks; wait until the previous one has finished."""
    if USE_PDL:
        tl_cuda.gdc_launch_dependents()
        tl_cuda.gdc_wait()


def pdl_options(device: torch.device) -> dict[str, bool]:
    """Launch arguments for ``device``: the constexpr ``USE_PDL``, and Triton's own option."""
    return _options(device.type, device.index)


@cache
def _options(kind: str, index: int | None) -> dict[str, bool]:
    nvidia = kind == "cuda" and torch.version.hip is None
    if not nvidia or torch.cuda.get_device_capability(index) < (9, 0):
        return {"USE_PDL": False}
    return {"USE_PDL": True, "launch_pdl": True}
