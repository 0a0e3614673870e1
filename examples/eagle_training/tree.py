"""SGLang's draft tree for top-k > 1, in torch: which tokens it would draft, and what is accepted.

Each of k slots holds one branch. A step keeps the k best of k x k continuations by the product of
probabilities; the n-1 best nodes of all steps become the tree. A slot attends to the prefix and to
what the same slot read in earlier steps, even when its branch has moved to another parent: that is
what SGLang's per-slot key lists do, and it is kept here so that accept lengths agree.

S sequences, L prefix positions, k slots, H hidden size, V vocabulary (of the map, if there is one).
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F

from examples.eagle_training.model import EagleDraft


@dataclass(frozen=True)
class TreeShape:
    """SGLang's ``--speculative-num-steps``, ``-eagle-topk`` and ``-num-draft-tokens``."""

    steps: int = 4
    topk: int = 4
    draft_tokens: int = 16


class Tree(NamedTuple):
    """Drafted nodes in SGLang's order, the root left out."""

    tokens: torch.Tensor  # [S, n-1] token ids
    parents: torch.Tensor  # [S, n-1]; 0 is the root, m+1 is node m, -1 a node that was not kept


class Prefix(NamedTuple):
    """The draft's state over text whose hidden states come from the target."""

    keys: torch.Tensor  # [S, kv_heads, L, D]
    values: torch.Tensor  # [S, kv_heads, L, D]
    hidden: torch.Tensor  # [S, L, H] the draft's output at every position


class Shared(NamedTuple):
    """What the draft borrows from the target."""

    embedding: torch.Tensor  # [V_target, H]
    head: torch.Tensor  # [V, H], the rows of the map if there is one
    token_map: torch.Tensor | None  # [V] draft id to token id


def read_prefix(
    draft: EagleDraft, embedding: torch.Tensor, tokens: torch.Tensor, hidden: torch.Tensor
) -> Prefix:
    """Run the draft over known text; ``tokens`` and ``hidden`` as in ``train.unroll``."""
    length = tokens.shape[1]
    positions = torch.arange(length, device=tokens.device)
    attention = draft.layer.self_attn
    x = draft.mix(F.embedding(tokens, embedding), hidden)
    query, key, value = attention.project(x, positions[None])
    causal = positions[:, None] >= positions[None, :]
    return Prefix(key, value, draft.finish(x, attention(query, key, value, causal)))


class _Slots:
    """Branches being drafted: their keys and values, ``[S, kv_heads, k * steps so far, D]``."""

    def __init__(self, draft: EagleDraft, prefix: Prefix, committed: torch.Tensor) -> None:
        self.draft, self.prefix, self.committed = draft, prefix, committed
        self.keys, self.values = prefix.keys, prefix.values

    def step(self, embedded: torch.Tensor, hidden: torch.Tensor, step: int) -> torch.Tensor:
        """Read one token in every slot: ``[S, k, H]`` embeddings and hidden states."""
        attention = self.draft.layer.self_attn
        x = self.draft.mix(embedded, hidden)
        slots = x.shape[1]
        query, key, value = attention.project(x, (self.committed + step)[:, None].expand(-1, slots))
        self.keys = torch.cat((self.keys, key), dim=2)
        self.values = torch.cat((self.values, value), dim=2)
        length = self.prefix.keys.shape[2]
        committed = torch.arange(length, device=x.device) < self.committed[:, None]
        own = torch.eye(slots, dtype=torch.bool, device=x.device).repeat(1, step + 1)
        mask = torch.cat(
            (
                committed[:, None, :].expand(-1, slots, -1),
                own[None].expand(len(x), -1, -1),
            ),
            dim=-1,
        )
        return self.draft.finish(x, attention(query, self.keys, self.values, mask[:, None]))


def _best(hidden: torch.Tensor, shared: Shared, topk: int) -> tuple[torch.Tensor, torch.Tensor]:
    probabilities = torch.softmax((hidden @ shared.head.T).float(), dim=-1)
    values, ids = probabilities.topk(topk, dim=-1)
    return values, ids if shared.token_map is None else shared.token_map[ids]


def grow(
    draft: EagleDraft, shared: Shared, prefix: Prefix, committed: torch.Tensor, shape: TreeShape
) -> Tree:
    """Draft one tree for each sequence.

    Args:
        draft: the draft.
        shared: embedding, head and map.
        prefix: from :func:`read_prefix`.
        committed: ``[S]`` int64, tokens the target has read; the bonus token follows them.
        shape: steps, top-k and nodes.
    """
    k = shape.topk
    rows = torch.arange(len(committed), device=committed.device)
    last = prefix.hidden[rows, committed - 1]
    scores, tokens = _best(last, shared, k)
    hidden = last[:, None].expand(-1, k, -1)
    all_scores, all_tokens = [scores], [tokens]
    parents = [torch.zeros_like(tokens)]
    index = torch.arange(k, device=rows.device).expand_as(tokens)
    slots = _Slots(draft, prefix, committed)
    for step in range(1, shape.steps):
        hidden = slots.step(F.embedding(tokens, shared.embedding), hidden, step - 1)
        probabilities, candidates = _best(hidden, shared, k)
        expanded = (scores[:, :, None] * probabilities).flatten(1)
        all_scores.append(expanded)
        all_tokens.append(candidates.flatten(1))
        parents.append((index + 1).repeat_interleave(k, dim=1))
        scores, chosen = expanded.topk(k, dim=-1)
        tokens = candidates.flatten(1).gather(1, chosen)
        hidden = hidden[rows[:, None], chosen // k]
        index = chosen + k + k * k * (step - 1)
    scores, tokens, parent = (torch.cat(t, dim=1) for t in (all_scores, all_tokens, parents))
    kept = scores.topk(shape.draft_tokens - 1, dim=-1).indices.sort(dim=-1).values
    return Tree(tokens.gather(1, kept), _renumber(parent, kept))


def _renumber(parent: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    """Turn parents numbered among all candidates into parents numbered among the kept ones."""
    place = torch.full((len(parent), parent.shape[1] + 1), -1, device=parent.device)
    place[:, 0] = 0
    order = torch.arange(1, kept.shape[1] + 1, device=parent.device).expand_as(kept)
    place.scatter_(1, kept + 1, order)
    return place.gather(1, parent.gather(1, kept))


def accepted(tree: Tree, wanted: torch.Tensor) -> torch.Tensor:
    """Count the drafted tokens on the path the target takes.

    Args:
        tree: S trees.
        wanted: ``[S, steps]`` the target's tokens after the bonus token; -1 past the end.

    Returns:
        ``[S]`` int64.
    """
    node = torch.zeros(len(wanted), dtype=torch.int64, device=wanted.device)
    count = torch.zeros_like(node)
    alive = torch.ones_like(node, dtype=torch.bool)
    for depth in range(wanted.shape[1]):
        match = (tree.parents == node[:, None]) & (tree.tokens == wanted[:, depth, None])
        alive &= match.any(dim=1)
        node = torch.where(alive, match.int().argmax(dim=1) + 1, node)
        count += alive
    return count
