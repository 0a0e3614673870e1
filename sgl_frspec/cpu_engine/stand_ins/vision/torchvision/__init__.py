"""A stand-in for torchvision, which SGLang and transformers import even to serve text.

The registry's torchvision wheel is a CUDA build that breaks beside the CPU build of torch. Nothing
here computes anything: every function raises ``NotImplementedError`` with its name.
"""

from . import io, transforms

__version__ = "0.0.0+frspec.cpu"
__all__ = ["io", "transforms"]
