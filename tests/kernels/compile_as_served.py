"""Compile what Python calls would launch on an sm_90 GPU, with Triton's own specialisation.

The interpreter knows no specialisation: an integer argument of 1 becomes a constant, a multiple of
16 a promise, None another kernel. Run in a process of its own, without the interpreter.
"""

from collections import defaultdict
from types import ModuleType
from typing import Any, cast

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

PDL = {"USE_PDL": True, "launch_pdl": True}


class _AbsentGpu:
    """What Triton asks a driver before it compiles."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: Any = None) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


def compile_instead_of_launching(*modules: ModuleType) -> dict[str, set[str]]:
    """From now on launches of ``modules`` only compile, for sm_90: kernel -> hashes of variants."""
    compiled: dict[str, set[str]] = defaultdict(set)
    launch = JITFunction.run
    driver.set_active(cast(Any, _AbsentGpu()))

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **named: Any) -> Any:
        kernel: Any = launch(self, *args, grid=grid, warmup=True, **named)
        compiled[self.__name__].add(kernel.hash)
        return kernel

    JITFunction.run = compile_only  # pyright: ignore[reportAttributeAccessIssue]
    for module in modules:
        module.__dict__["pdl_options"] = lambda device: PDL
    return compiled
