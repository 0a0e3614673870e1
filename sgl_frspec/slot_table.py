"""Rows of the table of slots that hold what a round reserves behind the longest context.

Before every round SGLang reserves slots for two rounds behind each request, and writes them into
the request's row of ``req_to_token``. With pages of one slot its rows are ``4 + nodes`` wider than
the context, which is less: a request that comes close to the context's end would write into the
next request's row, whose first tokens are then read from the wrong slots, with no error on a GPU.
"""

from typing import Any

from sglang.srt.mem_cache import kv_cache_configurator
from sglang.srt.mem_cache.allocation_sizing import get_alloc_reserve_per_decode

_stock_extra = kv_cache_configurator.get_req_to_token_extra_context_len


def install() -> None:
    """Make the tables of this process wide enough, in a process that runs FRSPEC alone."""
    kv_cache_configurator.get_req_to_token_extra_context_len = extra_columns


def extra_columns(*server_args: Any) -> int:
    """Columns of a row beyond the context; older releases are asked with the server's arguments."""
    return max(_stock_extra(*server_args), get_alloc_reserve_per_decode(*server_args))
