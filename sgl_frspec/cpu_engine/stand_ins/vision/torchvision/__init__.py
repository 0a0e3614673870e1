"""A stand-in for torchvision, which SGLang and transformers import even to serve text.

The registry's torchvision wheel is a CUDA build that breaks beside the CPU build of torch. Nothing
here computes anything: every function raises ``NotImplementedError`` with its name. Refuses to be
imported outside a CPU engine process.
"""

import os

if os.environ.get("SGLANG_USE_CPU_ENGINE") != "1":
    raise ImportError(
        "this torchvision is sgl-frspec's stand-in for machines without a GPU, and "
        "SGLANG_USE_CPU_ENGINE is not 1; start servers with `frspec serve`, or take its folder off "
        "PYTHONPATH"
    )

from . import io, transforms

__version__ = "0.0.0+frspec.cpu"
__all__ = ["io", "transforms"]
