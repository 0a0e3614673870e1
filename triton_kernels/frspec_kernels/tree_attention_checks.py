"""What tree attention refuses, looking only at what the host knows: no device value is read.

So these are the caller's to keep: offsets and lengths that describe the lists, slots inside the
cache, no request of more than ``max_nodes`` nodes, finite sinks or ``-inf``.
"""

import torch
from torch import Tensor

from frspec_kernels.devices import check_devices
from frspec_kernels.tree_attention_inputs import (
    CACHE_DTYPES,
    AttentionShape,
    DraftTree,
    PagedContext,
)
from frspec_kernels.tree_attention_option_checks import check_scale

QUERY_DTYPES = (torch.bfloat16, torch.float16)
INDEX_DTYPES = (torch.int32, torch.int64)
HEAD_DIMS = (16, 256)  # a matrix unit's least; what fits into shared memory
# fp16 holds softmax weights / v_scale, for keys beside a scaled cache: no overflow, and no
# subnormal for a weight that counts.
FP16_V_SCALES = (2.0**-15, 2.0**10)


def check_inputs(q: Tensor, context: PagedContext, tree: DraftTree) -> AttentionShape:
    """The launch's sizes.

    Raises:
        TypeError: a dtype that the kernel does not take, a scale that is not a number.
        ValueError: shapes, strides, devices or scales that do not fit.
    """
    k, v = context.k_cache, context.v_cache
    if q.dim() != 3 or k.dim() != 3 or v.dim() != 3:
        raise ValueError(
            "q, k_cache and v_cache are [tokens, heads, dim], got "
            f"{tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)}; view a paged cache as slots"
        )
    shape = AttentionShape(q.shape[1], k.shape[1], q.shape[2], v.shape[2])
    fits = k.shape[2] == q.shape[2] and k.shape[:2] == v.shape[:2] and min(shape) > 0
    if not fits or shape.q_heads % shape.kv_heads:
        raise ValueError(
            f"q {tuple(q.shape)}, k_cache {tuple(k.shape)}, v_cache {tuple(v.shape)} do not fit: "
            "need one head dim for q and k, one [slots, KVH] for k and v, QH a multiple of KVH"
        )
    check_head_dims(shape)
    _check_types(q, context, tree)
    _check_context(context, tree)
    _check_tree(q, tree)
    _check_keys(q, context, tree, shape)
    check_devices(q.device, **_tensors(context, tree))
    return shape


def check_head_dims(shape: AttentionShape) -> None:
    """Head dims that the kernel has a configuration for.

    Raises:
        ValueError: others.
    """
    least, most = HEAD_DIMS
    if not (least <= shape.head_dim <= most and least <= shape.head_dim_v <= most):
        raise ValueError(
            f"head dims are in [{least}, {most}], got {shape.head_dim} and {shape.head_dim_v}; "
            "pad smaller heads with zeros, take another attention for larger ones"
        )


def _check_types(q: Tensor, context: PagedContext, tree: DraftTree) -> None:
    if q.dtype not in QUERY_DTYPES:
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
    if tree.mask.dtype not in INDEX_DTYPES:
        raise TypeError(f"mask words are int32 or int64, got {tree.mask.dtype}; pack the bits")
    for name, tensor in (("q", q), ("k_cache", context.k_cache), ("v_cache", context.v_cache)):
        if tensor.stride(-1) != 1:
            raise ValueError(
                f"{name}'s last dimension is contiguous, got strides {tensor.stride()}"
            )


def _check_context(context: PagedContext, tree: DraftTree) -> None:
    page, lengths = context.page_size, context.lengths
    if not isinstance(page, int):
        raise TypeError(f"page_size is an int, got {type(page).__name__}")
    if page < 1:
        raise ValueError(f"page_size is at least 1, got {page}")
    if page > 1 and lengths is None:
        raise ValueError(f"page_size={page} needs lengths: pages alone hide the tail")
    _check_indices("indptr", context.indptr, tree.batch + (lengths is None))
    _check_indices("indices", context.indices, 0)
    if lengths is not None:
        _check_indices("lengths", lengths, tree.batch)
    for name, scale in (("k_scale", context.k_scale), ("v_scale", context.v_scale)):
        check_scale(name, scale, "a cache that is not scaled has 1.0")


def _check_indices(name: str, tensor: Tensor, least: int) -> None:
    if tensor.dtype not in INDEX_DTYPES:
        raise TypeError(f"{name} is int32 or int64, got {tensor.dtype}; convert it")
    if tensor.dim() != 1 or not tensor.is_contiguous() or tensor.numel() < least:
        raise ValueError(
            f"{name} is one contiguous list of at least {least} entries, got "
            f"{list(tensor.shape)} with strides {list(tensor.stride())}"
        )


def _check_tree(q: Tensor, tree: DraftTree) -> None:
    nodes, mask = q.shape[0], tree.mask
    _check_indices("qo_indptr", tree.qo_indptr, 1)
    if not isinstance(tree.max_nodes, int):
        raise TypeError(f"max_nodes is an int, got {type(tree.max_nodes).__name__}")
    if tree.max_nodes < 1 or nodes > tree.batch * tree.max_nodes:
        raise ValueError(
            f"q has {nodes} nodes, but {tree.batch} requests of at most {tree.max_nodes} nodes are "
            "given; max_nodes is the most nodes of a request, at least 1"
        )
    if mask.dim() != 2 or mask.shape[0] != nodes or (mask.numel() and mask.stride(1) != 1):
        raise ValueError(
            f"mask is [{nodes}, words] with contiguous rows, got {tuple(mask.shape)} "
            f"with strides {mask.stride()}"
        )
    bits = 8 * mask.element_size() * mask.shape[1]
    if tree.key_indptr is None and bits < tree.max_nodes:
        raise ValueError(
            f"mask has {bits} bits a node for requests of up to {tree.max_nodes} nodes; "
            f"give {-(-tree.max_nodes // 32)} int32 words"
        )
    if tree.depths is not None:
        _check_indices("depths", tree.depths, nodes)


def _check_keys(q: Tensor, context: PagedContext, tree: DraftTree, shape: AttentionShape) -> None:
    if (tree.slots is None) == (tree.k is None) or (tree.k is None) != (tree.v is None):
        raise ValueError(
            "the tree's keys are either k and v, or slots of the cache: give one of them"
        )
    least = q.shape[0]  # key j is node j
    if tree.key_indptr is not None:
        _check_indices("key_indptr", tree.key_indptr, tree.batch + 1)
        least = 0
    if tree.slots is not None:
        _check_indices("slots", tree.slots, least)
    elif tree.k is not None and tree.v is not None:
        _check_own_keys(q, context, tree.k, tree.v, shape, least)
    if tree.key_depths is not None:
        _check_indices("key_depths", tree.key_depths, least)


def _check_own_keys(
    q: Tensor, context: PagedContext, k: Tensor, v: Tensor, shape: AttentionShape, least: int
) -> None:
    if k.dtype != q.dtype or v.dtype != q.dtype:
        raise TypeError(f"the tree's k, v are in q's {q.dtype}, got {k.dtype}, {v.dtype}")
    heads = shape.kv_heads
    fits = k.shape[1:] == (heads, shape.head_dim) and v.shape[1:] == (heads, shape.head_dim_v)
    if not fits or k.shape[0] != v.shape[0] or k.shape[0] < least:
        raise ValueError(
            f"the tree's k {tuple(k.shape)}, v {tuple(v.shape)} do not match {least} nodes and "
            f"the cache's {heads} heads of {shape.head_dim}, {shape.head_dim_v}"
        )
    if k.numel() and v.numel() and (k.stride(-1) != 1 or v.stride(-1) != 1):
        raise ValueError(
            "the last dimension of the tree's k and v is contiguous, got strides "
            f"{k.stride()}, {v.stride()}"
        )
    low, high = FP16_V_SCALES
    if q.dtype == torch.float16 and not low <= context.v_scale <= high:
        raise ValueError(
            f"fp16 holds the weights of keys beside the cache for v_scale in [{low:.1e}, "
            f"{high:g}], got {context.v_scale}; use bf16, or give the keys as slots of the cache"
        )


def _tensors(context: PagedContext, tree: DraftTree) -> dict[str, Tensor | None]:
    """Everything on the device, by the name that a complaint gives it."""
    own = {"k": tree.k, "v": tree.v, "mask": tree.mask, "slots": tree.slots}
    lists = {"qo_indptr": tree.qo_indptr, "key_indptr": tree.key_indptr, "depths": tree.depths}
    cache = {"k_cache": context.k_cache, "v_cache": context.v_cache, "indptr": context.indptr}
    rest = {"indices": context.indices, "lengths": context.lengths, "key_depths": tree.key_depths}
    return {**own, **lists, **cache, **rest}
