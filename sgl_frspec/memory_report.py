"""What freeing the draft's own tables early is worth, in tokens of KV cache.

SGLang's EAGLE gives the KV cache what is left beside the draft's own embedding and head, and
replaces these by the target's afterwards. FRSPEC replaces them before, at the price of its own
head of a few rows, so at the same ``--mem-fraction-static`` its cache holds more.
"""

import logging
from collections.abc import Iterable
from typing import Any

from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

logger = logging.getLogger(__name__)


def tokens_gained(saved: int, pools: Iterable[Any]) -> int:
    """Tokens for which ``saved`` bytes hold keys and values.

    Args:
        saved: bytes.
        pools: SGLang's KV caches of target and draft; a token takes a slot of each.
    """
    # Besides its slots a cache has a page for padding.
    slots = [(sum(pool.get_kv_size_bytes()), pool.size + pool.page_size) for pool in pools]
    return int(saved / sum(size / count for size, count in slots))


def report_memory(draft_worker: Any, target_runner: Any) -> None:
    """Log the gain, when the caches have their sizes."""
    server_args, draft_runner = draft_worker.server_args, draft_worker.draft_runner
    pools = [runner.token_to_kv_pool for runner in (target_runner, draft_runner)]
    if any(type(pool) is not MHATokenToKVPool for pool in pools):
        return  # A token has no one size in the others.
    head = draft_runner.model.lm_head.weight.nbytes
    given = server_args.max_total_tokens is not None
    logger.info(
        "FRSPEC freed %.1f MB of the draft's embedding and head before the KV cache was sized, for"
        " a head of %.1f MB: %+d tokens against EAGLE %s",
        draft_worker.freed_bytes / (1 << 20),
        head / (1 << 20),
        tokens_gained(draft_worker.freed_bytes - head, pools),
        "without --max-total-tokens" if given else "at this --mem-fraction-static",
    )
