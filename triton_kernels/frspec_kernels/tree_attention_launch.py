"""Launch configurations of tree attention: pure Python, no GPU needed.

The grid is fixed by batch, heads, the largest node count and the SM count; never by the contexts.
"""

from dataclasses import dataclass
from functools import lru_cache
from math import ceil

import torch


@dataclass(frozen=True)
class TreeAttentionConfig:
    """How one launch is cut."""

    block_m: int  # query rows (nodes x heads of one KV head) in a program
    block_n: int  # keys in a tile
    num_warps: int
    num_stages: int
    programs_per_sm: int  # slots that the splits of all requests share, per SM
    min_tiles: int = 1  # a split is not cut below this many tiles
    prefetch: bool = False  # read a tile's page-table entries one tile ahead
    max_registers: int | None = None  # a cap, for more programs per SM
    merge_block_s: int = 16  # parts that a merge program reads at once


def launch_config(rows: int, head_dim: int) -> TreeAttentionConfig:
    """Configuration for ``rows`` = nodes x (query heads / KV heads) of the largest request."""
    wide = head_dim > 128
    if rows <= 64:
        return TreeAttentionConfig(64, 32 if wide else 64, 4, 3, 1 if wide else 2)
    return TreeAttentionConfig(128, 32 if wide else 64, 8, 3, 1)


@dataclass(frozen=True)
class LaunchShape:
    """Grid and workspace that a configuration needs for given shapes."""

    m_tiles: int
    num_slots: int
    grid: tuple[int, int, int]
    max_parts: int
    max_rows: int

    @classmethod
    def of(
        cls, config: TreeAttentionConfig, *, batch: int, kv_heads: int, rows: int, sm_count: int
    ) -> "LaunchShape":
        """Shape for ``batch`` requests of at most ``rows`` query rows per KV head."""
        m_tiles = max(1, ceil(rows / config.block_m))
        slots = max(1, config.programs_per_sm * sm_count // (kv_heads * m_tiles))
        programs = slots if batch == 1 else slots + batch
        return cls(m_tiles, slots, (m_tiles, kv_heads, programs), slots * 4 // 3 + 1, rows)


def multiprocessors(device: torch.device) -> int:
    """SMs of the device; under the interpreter, enough to split."""
    return _multiprocessors(device.index) if device.type == "cuda" else 4


@lru_cache
def _multiprocessors(index: int | None) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count
