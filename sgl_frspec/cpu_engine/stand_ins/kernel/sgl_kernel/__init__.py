"""What SGLang takes from ``sgl_kernel`` on a CPU, in plain PyTorch.

``sgl_kernel`` has no CPU wheel, and SGLang's CPU engine imports these operators by name. Signatures
are SGLang's (0.5.23); outputs are written in place, as there. Anything else raises
``NotImplementedError`` with its name when it is called, never silently.

This folder is on ``sys.path`` only in a server process that ``sgl_frspec.cpu_engine`` set up. It
refuses to be imported beside CUDA or beside a real ``sgl_kernel``.
"""

from collections.abc import Callable
from typing import NoReturn

from .activation import refuse_unless_cpu_engine

refuse_unless_cpu_engine()

from .kv_copy import copy_all_layer_kv_cache_cpu  # noqa: E402
from .slots import (  # noqa: E402
    assign_draft_cache_locs_contiguous_cpu,
    assign_extend_cache_locs_cpu,
    assign_req_to_token_pool_cpu,
    fill_accept_out_cache_loc_cpu,
    fill_bonus_tokens_cpu,
)
from .tree import build_tree_kernel_efficient_cpu, verify_tree_greedy_cpu  # noqa: E402

__version__ = "0.0.0+frspec.cpu"
__all__ = [
    "assign_draft_cache_locs_contiguous_cpu",
    "assign_extend_cache_locs_cpu",
    "assign_req_to_token_pool_cpu",
    "build_tree_kernel_efficient_cpu",
    "copy_all_layer_kv_cache_cpu",
    "fill_accept_out_cache_loc_cpu",
    "fill_bonus_tokens_cpu",
    "verify_tree_greedy_cpu",
]


def __getattr__(name: str) -> Callable[..., NoReturn]:
    if name.startswith("__"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def missing(*args: object, **kwargs: object) -> NoReturn:
        raise NotImplementedError(
            f"sgl_kernel.{name} has no CPU implementation in sgl-frspec's CPU engine "
            "(docs/cpu-engine.md lists what it supports); run this model or option on a GPU"
        )

    missing.__name__ = name
    return missing
