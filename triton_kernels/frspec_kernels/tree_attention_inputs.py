"""What tree attention takes: the paged contexts, the tree, the workspace; and their checks."""

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
    k_scale: float = 1.0
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


def check_inputs(
    q: torch.Tensor, context: PagedContext, tree: DraftTree, window_left: int
) -> AttentionShape:
    """The launch's sizes.

    Raises:
        TypeError: a dtype that the kernel does not take.
        ValueError: shapes, strides or options that do not fit together.
    """
    k, v = context.k_cache, context.v_cache
    if q.dim() != 3 or k.dim() != 3 or v.dim() != 3:
        raise ValueError(
            "q, k_cache and v_cache are [tokens, heads, dim], got "
            f"{tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)}; view a paged cache as slots"
        )
    shape = AttentionShape(q.shape[1], k.shape[1], q.shape[2], v.shape[2])
    if k.shape[2] != q.shape[2] or k.shape[:2] != v.shape[:2] or shape.q_heads % shape.kv_heads:
        raise ValueError(
            f"q {tuple(q.shape)}, k_cache {tuple(k.shape)}, v_cache {tuple(v.shape)} do not fit: "
            "need one head dim for q and k, one [slots, KVH] for k and v, QH a multiple of KVH"
        )
    _check_types(q, context, tree)
    _check_context(context, tree)
    _check_tree(q, context, tree, shape)
    if window_left >= 0 and tree.depths is None:
        raise ValueError(f"window_left={window_left} needs the tree's depths")
    if window_left >= 0 and tree.key_indptr is not None and tree.key_depths is None:
        raise ValueError("a sliding window over keys of their own key_indptr needs key_depths")
    return shape


def _check_types(q: torch.Tensor, context: PagedContext, tree: DraftTree) -> None:
    if q.dtype not in (torch.bfloat16, torch.float16):
        raise TypeError(f"q is bf16 or fp16, got {q.dtype}")
    cache = context.k_cache.dtype
    if cache not in CACHE_DTYPES or context.v_cache.dtype != cache:
        raise TypeError(
            f"k_cache and v_cache share one of {CACHE_DTYPES}, got {cache}, {context.v_cache.dtype}"
        )
    if cache != torch.float8_e4m3fn and cache != q.dtype:
        raise TypeError(
            f"q is {q.dtype} but the cache is {cache}; cast q or keep the cache in its type"
        )
    if tree.mask.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"mask words are int32 or int64, got {tree.mask.dtype}; pack the bits")
    for name, tensor in (("q", q), ("k_cache", context.k_cache), ("v_cache", context.v_cache)):
        if tensor.stride(-1) != 1:
            raise ValueError(
                f"{name}'s last dimension is contiguous, got strides {tensor.stride()}"
            )


def _check_context(context: PagedContext, tree: DraftTree) -> None:
    if context.page_size > 1 and context.lengths is None:
        raise ValueError(f"page_size={context.page_size} needs lengths: pages alone hide the tail")
    if context.page_size < 1:
        raise ValueError(f"page_size is at least 1, got {context.page_size}")
    need = tree.batch + (context.lengths is None)
    if context.indptr.numel() < need:
        raise ValueError(f"indptr has {context.indptr.numel()} entries for {tree.batch} requests")
    if context.lengths is not None and context.lengths.numel() < tree.batch:
        raise ValueError(f"lengths has {context.lengths.numel()} entries for {tree.batch} requests")
    if context.k_scale <= 0:
        raise ValueError(f"k_scale is positive, got {context.k_scale}")


def _check_tree(
    q: torch.Tensor, context: PagedContext, tree: DraftTree, shape: AttentionShape
) -> None:
    if tree.batch < 1 or tree.max_nodes < 1:
        raise ValueError(f"need a request and a node, got {tree.batch} and {tree.max_nodes}")
    if tree.mask.dim() != 2 or tree.mask.shape[0] != q.shape[0] or tree.mask.stride(1) != 1:
        raise ValueError(
            f"mask is [{q.shape[0]}, words] with contiguous rows, got {tuple(tree.mask.shape)} "
            f"with strides {tree.mask.stride()}"
        )
    if (tree.slots is None) == (tree.k is None) or (tree.k is None) != (tree.v is None):
        raise ValueError(
            "the tree's keys are either k and v, or slots of the cache: give one of them"
        )
    if tree.k is None or tree.v is None:
        return
    if tree.k.dtype != q.dtype or tree.v.dtype != q.dtype:
        raise TypeError(f"the tree's k, v are in q's {q.dtype}, got {tree.k.dtype}, {tree.v.dtype}")
    if (
        tree.k.shape[1:] != context.k_cache.shape[1:]
        or tree.v.shape[1:] != context.v_cache.shape[1:]
    ):
        raise ValueError(
            f"the tree's k {tuple(tree.k.shape)}, v {tuple(tree.v.shape)} do not match "
            f"the cache's {shape.kv_heads} heads of {shape.head_dim}, {shape.head_dim_v}"
        )
    if tree.k.stride(-1) != 1 or tree.v.stride(-1) != 1:
        raise ValueError("the last dimension of the tree's k and v is contiguous")
