"""What tree attention takes: the paged contexts, the tree, the workspace."""

from dataclasses import dataclass
from typing import NamedTuple

import torch

CACHE_DTYPES = (torch.bfloat16, torch.float16, torch.float8_e4m3fn)


@dataclass(frozen=True)
class PagedContext:
    """The contexts of ``B`` requests in a shared cache.

    With ``lengths`` the lists may lie in any table (rows of ``req_to_token``, a padded page table):
    ``indptr[b]`` is then only where the list of request ``b`` starts. Slots not listed are never
    read into a result.
    """

    k_cache: torch.Tensor  # [slots, KVH, D]; slot = page * page_size + offset
    v_cache: torch.Tensor  # [slots, KVH, DV]
    indptr: torch.Tensor  # [B + 1] int32 | int64, into indices; [B] will do with lengths
    indices: torch.Tensor  # int32 | int64: slots, or pages when page_size > 1
    lengths: torch.Tensor | None = None  # [B] tokens; required when page_size > 1
    page_size: int = 1
    k_scale: float = 1.0  # of the whole cache, on the host
    v_scale: float = 1.0


@dataclass(frozen=True)
class DraftTree:
    """Nodes, and the keys they may see besides the context.

    The keys are ``k``/``v`` rows, or rows of the cache at ``slots``. By default key ``j`` of a
    request is its node ``j``; ``key_indptr`` says otherwise (draft decoding: keys of earlier steps
    too).
    """

    qo_indptr: torch.Tensor  # [B + 1] int32 | int64, into the nodes
    max_nodes: int  # of one request; fixes the grid
    mask: torch.Tensor  # [T, W] int32, or int64 read as pairs; key j: bit j % 32 of word j // 32
    k: torch.Tensor | None = None  # [K, KVH, D]
    v: torch.Tensor | None = None  # [K, KVH, DV]
    slots: torch.Tensor | None = None  # [K] int32 | int64
    key_indptr: torch.Tensor | None = None  # [B + 1]
    depths: torch.Tensor | None = None  # [T] int: position minus context length; for windows
    key_depths: torch.Tensor | None = None  # [K] int; default: depths

    @property
    def batch(self) -> int:
        """Requests."""
        return self.qo_indptr.numel() - 1


@dataclass(frozen=True)
class TreeAttentionWorkspace:
    """Partial results of the splits; one serves every layer and every smaller launch.

    A launch lays its own ``[P, KVH, R]`` rows into the first dimension.
    """

    part_out: torch.Tensor  # [rows, DV] float32
    part_lse: torch.Tensor  # [rows] float32


class AttentionShape(NamedTuple):
    """Sizes that fix a launch."""

    q_heads: int
    kv_heads: int
    head_dim: int
    head_dim_v: int

    @property
    def group(self) -> int:
        """Query heads of a KV head."""
        return self.q_heads // self.kv_heads
