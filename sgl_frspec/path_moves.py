"""Keys and values of accepted paths, brought to the front of their trees after a verification."""

from collections.abc import Callable
from typing import Any

from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

from frspec_kernels.cache_moves import WORD_BYTES, cache_rows, move_paths
from frspec_kernels.tree import Accepted
from sgl_frspec.verify import slot_moves

_SCALES = ("k_scale_buffer", "native_k_scale_buffer")


def path_mover(pool: Any) -> Callable[[Accepted], None]:
    """What moves the accepted paths in ``pool``, SGLang's KV cache of the target.

    On our kernel where a slot is a row of each layer's keys and of its values and nothing else; in
    SGLang's other layouts its own.
    """
    if not _is_rows_alone(pool):
        return lambda accepted: pool.move_kv_cache(*slot_moves(accepted))
    rows = cache_rows([*pool.k_buffer, *pool.v_buffer])

    def move(accepted: Accepted) -> None:
        if accepted.target_slots is None or accepted.source_slots is None:
            raise RuntimeError("the acceptance was not given the cache's slots")
        move_paths(rows, accepted.target_slots, accepted.source_slots)

    return move


def _is_rows_alone(pool: Any) -> bool:
    if type(pool) is not MHATokenToKVPool or not pool.layer_num:
        return False
    return _has_slot_rows(pool)


def _has_slot_rows(pool: Any) -> bool:
    slots = pool.size + pool.page_size
    buffers = [*pool.k_buffer, *pool.v_buffer]
    return (
        all(buffer.shape[0] == slots and buffer.is_contiguous() for buffer in buffers)
        and all(buffer[0].nbytes % WORD_BYTES == 0 for buffer in buffers)
        and all(getattr(pool, name, None) is None for name in _SCALES)
    )
