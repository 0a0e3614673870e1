"""The conditions under which the stand-in may be imported at all."""

import os
import sys
from importlib.machinery import PathFinder
from pathlib import Path

import torch


def refuse_unless_cpu_engine() -> None:
    """Raise ``ImportError`` unless this is a CPU engine process without a real ``sgl_kernel``."""
    if os.environ.get("SGLANG_USE_CPU_ENGINE") != "1":
        raise ImportError(
            "this sgl_kernel is sgl-frspec's stand-in for machines without a GPU, and "
            "SGLANG_USE_CPU_ENGINE is not 1; start servers with `frspec serve`, or take "
            f"{_own_folder()} off PYTHONPATH"
        )
    if torch.cuda.is_available():
        raise ImportError(
            "CUDA is available: sgl-frspec's stand-in for sgl_kernel is for machines without a "
            f"GPU; take {_own_folder()} off PYTHONPATH and unset SGLANG_USE_CPU_ENGINE"
        )
    real = real_sgl_kernel()
    if real:
        raise ImportError(
            f"a real sgl_kernel is installed at {real}: sgl-frspec's stand-in does not replace "
            "it; use an environment without sglang-kernel for the CPU engine"
        )


def real_sgl_kernel() -> str | None:
    """Where an ``sgl_kernel`` other than this one lies on ``sys.path``, or None."""
    own = _own_folder()
    others = [entry for entry in sys.path if Path(entry or ".").resolve() != own]
    spec = PathFinder.find_spec("sgl_kernel", others)
    return spec.origin if spec else None


def _own_folder() -> Path:
    return Path(__file__).resolve().parents[1]
