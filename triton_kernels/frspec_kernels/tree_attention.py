"""Attention of draft-tree nodes over a paged KV cache plus the tree's own keys.

    out[i] = sum_j p_ij v_j,   p_i = softmax over the keys that node i sees

Node ``i`` of request ``b`` sees the whole context of ``b`` (within the sliding window, if any) and
those tree keys whose bit is set in its mask row. The context is cut into splits (see
:mod:`frspec_kernels.split_merge`); a split reads its keys once for all nodes of the request and all
query heads of a KV head, then the parts are merged.

Letters: ``B`` requests, ``T`` nodes of all requests, ``QH`` / ``KVH`` query / KV heads, ``D`` /
``DV`` key / value head dim, ``W`` mask words a node, ``K`` tree keys of all requests.

Numerics: bf16/fp16 operands, float32 scores, softmax state and accumulation in base 2; fp8 caches
are converted to the query's type, their scales applied in float32. A node that sees nothing gets
zeros and a log-sum-exp of ``-inf``.

CUDA-graph safe for any lengths when ``out`` and ``workspace`` are given: the device makes the plan.
"""

from typing import Any

import torch
import triton

from frspec_kernels.pdl import pdl_options
from frspec_kernels.split_merge import merge_splits_kernel
from frspec_kernels.tree_attention_checks import check_head_dims, check_inputs
from frspec_kernels.tree_attention_inputs import (
    AttentionShape,
    DraftTree,
    PagedContext,
    TreeAttentionWorkspace,
)
from frspec_kernels.tree_attention_kernels import tree_attention_kernel
from frspec_kernels.tree_attention_launch import (
    LaunchShape,
    TreeAttentionConfig,
    launch_config,
    multiprocessors,
    shared_memory,
)
from frspec_kernels.tree_attention_option_checks import (
    check_options,
    check_outputs,
    check_workspace,
)


def tree_attention(
    q: torch.Tensor,
    context: PagedContext,
    tree: DraftTree,
    *,
    sm_scale: float | None = None,
    logit_cap: float = 0.0,
    window_left: int = -1,
    sinks: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    workspace: TreeAttentionWorkspace | None = None,
    config: TreeAttentionConfig | None = None,
) -> torch.Tensor:
    """Attention output of every tree node.

    Args:
        q: ``[T, QH, D]`` bf16 or fp16.
        context: the requests' contexts in the cache.
        tree: the nodes, their own keys and the mask.
        sm_scale: logits are ``q . k * sm_scale``; default ``D ** -0.5``.
        logit_cap: logits ``x`` become ``cap * tanh(x / cap)``; 0: they stay.
        window_left: a node sees keys at most this many positions before it; -1: all.
        sinks: ``[QH]`` logits that join every softmax's denominator; float32, bf16 or fp16.
        out: ``[T, QH, DV]`` in q's dtype; allocated when absent.
        lse: ``[T, QH]`` float32, filled with the natural log of the denominator, sink included.
        workspace: from :func:`tree_attention_workspace`; allocated when absent.
        config: overrides :func:`launch_config`.

    Returns:
        ``out``.

    Raises:
        TypeError, ValueError: what :mod:`frspec_kernels.tree_attention_checks` refuses.
    """
    sizes = check_inputs(q, context, tree)
    scale = sizes.head_dim**-0.5 if sm_scale is None else sm_scale
    check_options(tree, scale, logit_cap, window_left)
    if out is None:
        out = q.new_empty(q.shape[0], sizes.q_heads, sizes.head_dim_v)
    check_outputs(q, sizes, out, lse, sinks)
    if tree.batch == 0:
        return out
    rows = tree.max_nodes * sizes.group
    config = config or launch_config(
        rows,
        max(sizes.head_dim, sizes.head_dim_v),
        tree.batch,
        shared_memory(q.device),
        converts=context.k_cache.dtype != q.dtype,
    )
    launch = LaunchShape.of(
        config,
        batch=tree.batch,
        kv_heads=sizes.kv_heads,
        rows=rows,
        sm_count=multiprocessors(q.device),
    )
    if workspace is None:
        workspace = _allocate(launch.part_rows, sizes, q.device)
    check_workspace(workspace, launch.part_rows, sizes, q.device)
    common = _common_arguments(context, tree, sizes, launch, config)
    common.update(
        sinks_ptr=sinks,
        out_ptr=out,
        lse_ptr=lse,
        part_out_ptr=workspace.part_out,
        part_lse_ptr=workspace.part_lse,
        max_rows=launch.max_rows,
        stride_out_node=out.stride(0),
        stride_out_head=out.stride(1),
        stride_lse_node=0 if lse is None else lse.stride(0),
        WINDOW_LEFT=window_left,
        HAS_SINKS=sinks is not None,
        STORE_LSE=lse is not None,
    )
    scores: dict[str, Any] = {
        "sm_scale": scale,
        "logit_cap": logit_cap,
        "HAS_CAP": logit_cap > 0,
    }
    tree_attention_kernel[launch.grid](
        **common, **scores, **_key_arguments(q, context, tree, config)
    )
    if launch.num_slots > 1:
        merge: dict[str, Any] = {
            "KV_HEADS": sizes.kv_heads,
            "BLOCK_S": config.merge_block_s,
            "BLOCK_R": config.merge_block_r,
            "num_warps": config.merge_warps,
        }
        merge_splits_kernel[(launch.merge_programs,)](**(common | merge))
    return out


def tree_attention_workspace(
    sizes: AttentionShape,
    *,
    batch: int,
    max_nodes: int,
    device: torch.device,
    config: TreeAttentionConfig | None = None,
) -> TreeAttentionWorkspace:
    """Buffers for every launch of at most ``batch`` requests of at most ``max_nodes`` nodes.

    Raises:
        ValueError: head dims that the kernel does not take; no request or no node.
    """
    check_head_dims(sizes)
    if batch < 1 or max_nodes < 1:
        raise ValueError(f"batch and max_nodes are at least 1, got {batch} and {max_nodes}")
    dim, sm_count = max(sizes.head_dim, sizes.head_dim_v), multiprocessors(device)

    def part_rows(nodes: int, requests: int) -> int:
        rows = nodes * sizes.group
        return LaunchShape.of(
            config or launch_config(rows, dim, requests, shared_memory(device)),
            batch=requests,
            kv_heads=sizes.kv_heads,
            rows=rows,
            sm_count=sm_count,
        ).part_rows

    # Fewer nodes may be cut into more parts, so the largest launch is not always the widest.
    most = max(part_rows(n, b) for n in range(1, max_nodes + 1) for b in {1, batch})
    return _allocate(most, sizes, device)


def _allocate(
    part_rows: int, sizes: AttentionShape, device: torch.device
) -> TreeAttentionWorkspace:
    return TreeAttentionWorkspace(
        torch.empty(part_rows, sizes.head_dim_v, dtype=torch.float32, device=device),
        torch.empty(part_rows, dtype=torch.float32, device=device),
    )


def _common_arguments(
    context: PagedContext,
    tree: DraftTree,
    sizes: AttentionShape,
    launch: LaunchShape,
    config: TreeAttentionConfig,
) -> dict[str, Any]:
    """What both kernels plan from."""
    return {
        "kv_indptr_ptr": context.indptr,
        "context_lens_ptr": context.lengths,
        "qo_indptr_ptr": tree.qo_indptr,
        "key_indptr_ptr": tree.qo_indptr if tree.key_indptr is None else tree.key_indptr,
        "batch": tree.batch,
        "num_slots": launch.num_slots,
        "min_tiles": config.min_tiles,
        "GROUP": sizes.group,
        "DV": sizes.head_dim_v,
        "HAS_LENS": context.lengths is not None,
        "BLOCK_B": _block_b(tree.batch),
        "BLOCK_N": config.block_n,
        "STEP": config.step,
        "BLOCK_DV": triton.next_power_of_2(sizes.head_dim_v),
        **pdl_options(tree.mask.device),
    }


def _block_b(batch: int) -> int:
    """Requests that a program plans for: 1 is free, 2 to 32 cost a warp the same."""
    return 1 if batch == 1 else max(32, triton.next_power_of_2(batch))


def _key_arguments(
    q: torch.Tensor, context: PagedContext, tree: DraftTree, config: TreeAttentionConfig
) -> dict[str, Any]:
    """What only the split kernel reads."""
    k_tree = context.k_cache if tree.k is None else tree.k
    v_tree = context.v_cache if tree.v is None else tree.v
    mask = tree.mask.view(torch.int32)
    return {
        "q_ptr": q,
        "k_cache_ptr": context.k_cache,
        "v_cache_ptr": context.v_cache,
        "kv_indices_ptr": context.indices,
        "k_tree_ptr": k_tree,
        "v_tree_ptr": v_tree,
        "tree_slots_ptr": tree.slots,
        "mask_ptr": mask,
        "depths_ptr": tree.depths,
        "key_depths_ptr": tree.depths if tree.key_depths is None else tree.key_depths,
        "mask_words": mask.shape[1],
        "k_scale": context.k_scale,
        "v_scale": context.v_scale,
        "stride_q_node": q.stride(0),
        "stride_q_head": q.stride(1),
        "stride_k_slot": context.k_cache.stride(0),
        "stride_k_head": context.k_cache.stride(1),
        "stride_v_slot": context.v_cache.stride(0),
        "stride_v_head": context.v_cache.stride(1),
        "stride_kt_row": k_tree.stride(0),
        "stride_kt_head": k_tree.stride(1),
        "stride_vt_row": v_tree.stride(0),
        "stride_vt_head": v_tree.stride(1),
        "stride_mask": mask.stride(0),
        "D": q.shape[2],
        "PAGE_SIZE": context.page_size,
        "TREE_IN_CACHE": tree.slots is not None,
        "PREFETCH": config.prefetch,
        "BLOCK_M": config.block_m,
        "BLOCK_D": triton.next_power_of_2(q.shape[2]),
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
    }
