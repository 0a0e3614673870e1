"""Which KV slots each request's queries read, and under which mask: worked out once a forward pass.

Every forward mode of SGLang becomes a list of ``RequestPlan``, one a request, so that attention is
one call of PyTorch's SDPA a request and layer, whatever the number of tree branches.

Letters: B requests, n queries of one request, m its keys, N tree nodes, K top-k, S draft steps.
``rows`` are the requests' rows of ``req_to_token`` ``[B, C]``.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class RequestPlan:
    """Queries ``start:stop`` of the flat batch read ``slots`` under ``mask``.

    ``slots`` indexes the pool's slot axis: an int64 tensor ``[m]``, or a slice where the slots
    happen to lie side by side, which spares SDPA a gathered copy. ``mask`` is bool ``[n, m]``, True
    where visible; None with ``causal`` is the lower triangle (n = m), None without it shows all.
    ``query_at`` ``[n]`` and ``key_at`` ``[m]`` are positions in the text, which windows go by.
    """

    start: int
    stop: int
    slots: Tensor | slice
    query_at: Tensor
    key_at: Tensor
    mask: Tensor | None = None
    causal: bool = False

    def window_mask(self, window: int) -> Tensor:
        """The mask of a layer whose queries see at most ``window`` positions back, ``[n, m]``."""
        near = self.key_at[None, :] >= self.query_at[:, None] - window
        if self.causal:
            return near & (self.key_at[None, :] <= self.query_at[:, None])
        return near if self.mask is None else near & self.mask


def plan_decode(rows: Tensor, seq_lens: Sequence[int]) -> list[RequestPlan]:
    """One query a request, over all its tokens; ``seq_lens`` includes the query's own."""
    plans = []
    for b, length in enumerate(seq_lens):
        at = torch.arange(length)
        plans.append(RequestPlan(b, b + 1, _compact(rows[b, :length]), at[-1:], at))
    return plans


def plan_extend(
    rows: Tensor, prefix_lens: Sequence[int], extend_lens: Sequence[int]
) -> list[RequestPlan]:
    """``extend_lens[b]`` new tokens after a cached prefix, causal."""
    plans, start = [], 0
    for b, (prefix, new) in enumerate(zip(prefix_lens, extend_lens, strict=True)):
        slots = _compact(rows[b, : prefix + new])
        mask = None
        if prefix and new > 1:
            mask = torch.ones(new, prefix + new, dtype=torch.bool).tril_(prefix)
        at = torch.arange(prefix + new)
        plan = RequestPlan(start, start + new, slots, at[prefix:], at, mask, causal=not prefix)
        plans.append(plan)
        start += new
    return plans


def plan_target_verify(
    rows: Tensor, prefix_lens: Sequence[int], tree_mask: Tensor, nodes: int
) -> list[RequestPlan]:
    """``nodes`` tree nodes a request, each seeing the prefix and its own ancestors.

    ``tree_mask`` is flat bool ``[>= B * N * N]``: SGLang's QLEN_ONLY layout.
    """
    masks = tree_mask.flatten()[: len(prefix_lens) * nodes * nodes].view(-1, nodes, nodes).bool()
    plans = []
    for b, prefix in enumerate(prefix_lens):
        mask = torch.cat([torch.ones(nodes, prefix, dtype=torch.bool), masks[b]], dim=1)
        slots = _compact(rows[b, : prefix + nodes])
        # A node sees its ancestors and itself, so it stands one position past them.
        at = prefix + masks[b].sum(dim=1) - 1
        key_at = torch.cat([torch.arange(prefix), at])
        plans.append(RequestPlan(b * nodes, (b + 1) * nodes, slots, at, key_at, mask))
    return plans


def plan_draft_decode(
    rows: Tensor, prefix_lens: Sequence[int], topk: int, steps: int, step: int, page_size: int
) -> list[RequestPlan]:
    """Draft step ``step`` (from 0): K branches a request, over one copy of the shared prefix.

    A branch sees the prefix and its own slots of steps ``0..step``. The branches' slots follow the
    prefix as SGLang reserves them: ``S`` apart, or from a page of their own each when both
    ``page_size`` and ``topk`` exceed 1.
    """
    own = torch.eye(topk, dtype=torch.bool).repeat_interleave(step + 1, dim=1)
    plans = []
    for b, prefix in enumerate(prefix_lens):
        starts = _branch_starts(prefix, topk, steps, page_size)
        columns = (starts[:, None] + torch.arange(step + 1)).flatten()
        slots = torch.cat([rows[b, :prefix], rows[b, columns]])
        mask = torch.cat([torch.ones(topk, prefix, dtype=torch.bool), own], dim=1)
        at = torch.full((topk,), prefix + step)
        key_at = torch.cat([torch.arange(prefix), prefix + torch.arange(step + 1).repeat(topk)])
        plan = RequestPlan(b * topk, (b + 1) * topk, _compact(slots), at, key_at, mask)
        plans.append(plan)
    return plans


def _branch_starts(prefix: int, topk: int, steps: int, page_size: int) -> Tensor:
    """Column of ``req_to_token`` where each branch's slots begin, int64 ``[K]``."""
    branch = torch.arange(topk)
    if page_size == 1 or topk == 1:
        return prefix + branch * steps
    tail = prefix % page_size
    pages = -(-(tail + steps) // page_size)
    return prefix + branch * (pages * page_size)


def _compact(slots: Tensor) -> Tensor | slice:
    """The same slots as a slice, if each follows the one before."""
    slots = slots.long()
    if slots.numel() and bool((slots.diff() == 1).all()):
        return slice(int(slots[0]), int(slots[-1]) + 1)
    return slots
