"""Slot bookkeeping: between requests' rows of ``req_to_token`` and flat lists of KV slots.

Letters: B requests in the batch, P pool rows, C context columns, K top-k, S steps or tree depth.
Index tensors are int32 or int64 and may differ in type, as SGLang passes them.
"""

import torch
from torch import Tensor


def assign_draft_cache_locs_contiguous_cpu(
    req_pool_indices: Tensor,  # [B]
    req_to_token: Tensor,  # [P, C]
    seq_lens: Tensor,  # [B]
    out_cache_loc: Tensor,  # [B * topk * num_cols], written
    pool_len: int,
    topk: int,
    num_cols: int,
) -> None:
    """Take the ``topk * num_cols`` slots after each request's committed tokens."""
    width = topk * num_cols
    columns = seq_lens.long()[:, None] + torch.arange(width)
    out_cache_loc.view(-1, width).copy_(req_to_token[req_pool_indices.long()[:, None], columns])


def assign_extend_cache_locs_cpu(
    req_pool_indices: Tensor,  # [B]
    req_to_token: Tensor,  # [P, C]
    start_offset: Tensor,  # [B]
    end_offset: Tensor,  # [B]
    out_cache_loc: Tensor,  # [>= sum(end - start)], written from the front
    pool_len: int,
) -> None:
    """Gather the slots ``start:end`` of each request, one after another."""
    rows, columns = _ragged_cells(req_pool_indices, start_offset, end_offset)
    out_cache_loc[: rows.numel()] = req_to_token[rows, columns].to(out_cache_loc.dtype)


def assign_req_to_token_pool_cpu(
    req_pool_indices: Tensor,  # [B]
    req_to_token: Tensor,  # [P, C], written
    start_offset: Tensor,  # [B]
    end_offset: Tensor,  # [B]
    out_cache_loc: Tensor,  # [>= sum(end - start)]
    pool_len: int,
) -> None:
    """Scatter consecutive slots to columns ``start:end`` of each request: the inverse gather."""
    rows, columns = _ragged_cells(req_pool_indices, start_offset, end_offset)
    req_to_token[rows, columns] = out_cache_loc[: rows.numel()].to(req_to_token.dtype)


def fill_bonus_tokens_cpu(
    accept_tokens: Tensor,  # [B * accept_stride]
    accept_lens: Tensor,  # [B], bonus included
    bonus_tokens: Tensor,  # [B], written
    accept_stride: int,
) -> None:
    """Take each request's last accepted token, which is the target's bonus."""
    last = accept_lens.long()[:, None] - 1
    bonus_tokens.copy_(accept_tokens.view(-1, accept_stride).gather(1, last)[:, 0])


def fill_accept_out_cache_loc_cpu(
    accept_index: Tensor,  # [B * S] or [B, S]: rows of out_cache_loc, -1 where rejected
    out_cache_loc: Tensor,
    accept_out_cache_loc: Tensor,  # written from the front
) -> None:
    """Pack the slots of accepted nodes together, in order."""
    accepted = accept_index.flatten()
    accepted = accepted[accepted >= 0].long()
    accept_out_cache_loc[: accepted.numel()] = out_cache_loc[accepted]


def _ragged_cells(rows: Tensor, starts: Tensor, ends: Tensor) -> tuple[Tensor, Tensor]:
    """Row and column, both int64 ``[sum(end - start)]``, of every cell of ragged ranges."""
    starts, lengths = starts.long(), (ends - starts).long()
    offsets = (starts - (lengths.cumsum(0) - lengths)).repeat_interleave(lengths)
    columns = torch.arange(offsets.numel()) + offsets
    return rows.long().repeat_interleave(lengths), columns
