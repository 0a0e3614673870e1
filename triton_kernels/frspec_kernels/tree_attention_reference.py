"""Tree attention in PyTorch: what the kernel must equal."""

import torch

from frspec_kernels.tree_attention_inputs import DraftTree, PagedContext


def tree_attention_reference(
    q: torch.Tensor,
    context: PagedContext,
    tree: DraftTree,
    *,
    sm_scale: float | None = None,
    logit_cap: float = 0.0,
    window_left: int = -1,
    sinks: torch.Tensor | None = None,
    compute_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and log-sum-exp in PyTorch: matrix products in ``compute_dtype`` (default: q's)."""
    dtype = compute_dtype or q.dtype
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    scale = sm_scale if sm_scale is not None else q.shape[-1] ** -0.5
    group = q.shape[1] // context.k_cache.shape[1]
    outs, lses = [], []
    for b in range(tree.qo_indptr.numel() - 1):
        rows = slice(int(tree.qo_indptr[b]), int(tree.qo_indptr[b + 1]))
        k, v, visible = _request_keys(context, tree, b, dtype, window_left)
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        scores = torch.einsum("nhd,mhd->hnm", q[rows].to(dtype), k).to(wide) * scale
        if logit_cap > 0:
            scores = logit_cap * torch.tanh(scores / logit_cap)
        scores = scores.masked_fill(~visible, float("-inf"))
        lse = torch.logsumexp(scores, -1)
        if sinks is not None:
            lse = torch.logaddexp(lse, sinks.to(wide)[:, None].expand_as(lse))
        probs = torch.exp(scores - lse.nan_to_num(neginf=0.0)[..., None])
        outs.append(torch.einsum("hnm,mhd->nhd", probs.to(dtype), v))
        lses.append(lse.T)
    out_dtype = q.dtype if compute_dtype is None else compute_dtype
    return torch.cat(outs).to(out_dtype), torch.cat(lses)


def _request_keys(
    context: PagedContext, tree: DraftTree, b: int, dtype: torch.dtype, window_left: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Keys, values and the nodes-by-keys visibility of one request."""
    start, page = int(context.indptr[b]), context.page_size
    length = int(
        context.lengths[b] if context.lengths is not None else context.indptr[b + 1] - start
    )
    tokens = torch.arange(length, device=context.indices.device)
    slots = context.indices[start + tokens // page].long() * page + tokens % page
    k = context.k_cache[slots].to(dtype) * context.k_scale
    v = context.v_cache[slots].to(dtype) * context.v_scale
    key_indptr = tree.qo_indptr if tree.key_indptr is None else tree.key_indptr
    keys = slice(int(key_indptr[b]), int(key_indptr[b + 1]))
    rows = slice(int(tree.qo_indptr[b]), int(tree.qo_indptr[b + 1]))
    if tree.slots is not None:
        own_k = context.k_cache[tree.slots[keys].long()].to(dtype) * context.k_scale
        own_v = context.v_cache[tree.slots[keys].long()].to(dtype) * context.v_scale
    else:
        own_k, own_v = _present(tree.k)[keys].to(dtype), _present(tree.v)[keys].to(dtype)
    words = tree.mask[rows].contiguous().view(torch.int32)
    column = torch.arange(keys.stop - keys.start, device=words.device)
    own = (words[:, column // 32] >> (column % 32).int()) & 1 == 1
    seen = torch.ones(own.shape[0], length, dtype=torch.bool, device=own.device)
    if window_left >= 0:
        depths = _present(tree.depths)[rows].long()
        key_depths = depths if tree.key_depths is None else tree.key_depths[keys].long()
        seen = length - tokens[None, :] + depths[:, None] <= window_left
        own = own & (depths[:, None] - key_depths[None, :] <= window_left)
    return torch.cat([k, own_k]), torch.cat([v, own_v]), torch.cat([seen, own], 1)


def _present(tensor: torch.Tensor | None) -> torch.Tensor:
    if tensor is None:
        raise ValueError("the tree lacks k, v or depths that these options need")
    return tensor
