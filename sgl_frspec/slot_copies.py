"""SGLang's copy of cache slots, which brings accepted paths to the front, in launches that fit.

A program of SGLang's kernel holds a tile of all slots of its launch. 64 are held in registers; 256,
which 64 requests with 3 drafted steps move, are not: compiled for sm_90 a thread has 10.7 KB of
stack, for which the driver takes 2.6 GiB, and on an H200 the copy took 730 µs of a round. Rows of 4
KB and more spill from 128 slots on. SGLang splits longer lists where its configuration says.
"""

from typing import Any

MOST_SLOTS = 64


def limit_copies(pool: Any) -> None:
    """Let ``pool``, SGLang's KV cache of the target, copy at most ``MOST_SLOTS`` in a launch.

    The moves of a path ascend and its targets are the first places of its tree, so no launch reads
    what an earlier one has written.
    """
    config = getattr(pool, "_kv_copy_config", None)
    if config and config["num_locs_upper"] > MOST_SLOTS:
        config["num_locs_upper"] = MOST_SLOTS
