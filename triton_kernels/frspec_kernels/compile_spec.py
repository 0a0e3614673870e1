"""What a kernel module ships, for compilation without a GPU: its ``compile_specs()``."""

from collections.abc import Mapping
from typing import Any, NamedTuple


class CompileSpec(NamedTuple):
    """One kernel in one shipped configuration.

    Attributes:
        kernel: the ``@triton.jit`` function.
        signature: type of each run-time argument in Triton's notation: ``*bf16``, ``i64``,
            ``fp32``. A trailing ``:16`` says that the pointer or integer is divisible by 16,
            as it is in serving (``triton.tools.compile`` reads it the same way).
        constexprs: value of each ``tl.constexpr`` argument.
        num_warps, num_stages: launch options.
    """

    kernel: Any
    signature: Mapping[str, str]
    constexprs: Mapping[str, Any]
    num_warps: int = 4
    num_stages: int = 3
