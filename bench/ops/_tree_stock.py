"""The stock path of a tree's bookkeeping: PyTorch operators, and SGLang's two CUDA kernels.

Written after SGLang 0.5.17 and 0.5.23 (``select_top_k_tokens``, ``organize_draft_results``,
``build_tree_kernel_efficient``, ``eagle_sample``): the same operators in the same order. Not
counted in SGLang's favour or ours: what its scheduler does with the outcome afterwards.
"""

import importlib
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from frspec_kernels.tree import TreeShape


class Level(NamedTuple):
    """What a stock step leaves behind: beams, and entries of the three lists."""

    tokens: Tensor
    hidden: Tensor
    beam_scores: Tensor
    scores: Tensor
    candidate_tokens: Tensor
    parents: Tensor


def grow(
    shape: TreeShape,
    step: int,
    probs: Tensor,
    token_ids: Tensor,
    hidden: Tensor,
    scores: Tensor | None,
    later: Callable[..., tuple[Tensor, ...]] | None = None,
) -> Level:
    """One draft step of the stock path, by ``later`` if it is not the first."""
    k = shape.top_k
    if scores is None:
        parents = torch.arange(-1, k, device=probs.device).expand(probs.shape[0], -1)
        copied = hidden.repeat_interleave(k, dim=0)
        return Level(token_ids.flatten(), copied, probs, probs[:, None], token_ids, parents)
    first = k * k * (step - 1) + k
    return Level(*(later or grow_later)(k, first, probs, token_ids, hidden, scores))


def grow_later(
    k: int, first: int, probs: Tensor, token_ids: Tensor, hidden: Tensor, scores: Tensor
) -> tuple[Tensor, ...]:
    """A step after the first; SGLang runs it under ``torch.compile(dynamic=True)``."""
    expanded = scores[:, :, None] * probs.view(-1, k, k)
    best, place = torch.topk(expanded.flatten(1), k, dim=-1)
    tokens = token_ids.view(-1, k * k)
    chosen = tokens.gather(1, place).flatten()
    offsets = torch.arange(0, hidden.shape[0], step=k, device=hidden.device)
    rows = place.flatten() // k + offsets.repeat_interleave(k)
    return chosen, hidden[rows], best, expanded, tokens, place + first


@cache
def compiled_grow_later() -> Callable[..., tuple[Tensor, ...]]:
    """:func:`grow_later` as SGLang runs it."""
    return torch.compile(grow_later, dynamic=True)


def organise(
    shape: TreeShape, scores: list[Tensor], tokens: list[Tensor], parents: list[Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """Parents' list, chosen candidates and their tokens."""
    everything = torch.cat(scores, dim=1).flatten(1)
    all_tokens = torch.cat(tokens, dim=1)
    best = torch.topk(everything, shape.nodes - 1, dim=-1).indices
    selected = torch.sort(best).values
    drafts = torch.gather(all_tokens, 1, selected)
    known = torch.cat(parents[:-1], dim=1) if len(parents) > 1 else parents[0][:, :0]
    return known, selected, drafts


def kernel(name: str) -> Any:
    """SGLang's CUDA kernel: ahead of time in sgl_kernel, or compiled when first called."""
    sgl_kernel = importlib.import_module("sgl_kernel")
    if hasattr(sgl_kernel, name):
        return getattr(sgl_kernel, name)
    return getattr(importlib.import_module("sglang.kernels.ops.speculative.tree"), name)


class StockTree(NamedTuple):
    """What the stock build gives to the verification."""

    tokens: Tensor  # [B, N]
    positions: Tensor  # [B * N]
    mask: Tensor  # [B, N, N] bool
    retrieve_index: Tensor
    next_token: Tensor
    next_sibling: Tensor


def build(
    shape: TreeShape, known: Tensor, selected: Tensor, drafts: Tensor, roots: Tensor, lens: Tensor
) -> StockTree:
    """The stock build with the mask that costs least, draft by draft (``QLEN_ONLY``)."""
    batch, n = roots.numel(), shape.nodes
    tokens = torch.cat([roots[:, None], drafts], dim=1)
    mask = torch.full((batch * n * n,), True, device=roots.device)
    links = torch.full((3, batch, n), -1, dtype=torch.int64, device=roots.device)
    positions = torch.empty(batch * n, dtype=torch.int64, device=roots.device)
    kernel("build_tree_kernel_efficient")(
        known, selected, lens, mask, positions, *links, shape.top_k, shape.steps, n, 1
    )
    return StockTree(tokens, positions, mask.view(batch, n, n), *links)


def accept(
    shape: TreeShape, tokens: Tensor, links: tuple[Tensor, Tensor, Tensor], target: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Stock greedy verification: predicts, accept_index, accepted drafts."""
    batch, n = tokens.shape
    predicts = torch.zeros(batch * n, dtype=torch.int32, device=tokens.device)
    index = torch.full((batch, shape.steps + 1), -1, dtype=torch.int32, device=tokens.device)
    count = torch.empty(batch, dtype=torch.int32, device=tokens.device)
    kernel("verify_tree_greedy")(
        predicts=predicts,
        accept_index=index,
        accept_token_num=count,
        candidates=tokens,
        retrive_index=links[0],
        retrive_next_token=links[1],
        retrive_next_sibling=links[2],
        target_predict=target,
    )
    return predicts, index, count
