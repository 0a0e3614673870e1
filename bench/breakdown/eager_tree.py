"""The tree of an EAGLE-2 cycle as tensor operations: choosing nodes, their masks, acceptance.

B requests, N verified nodes, S steps. The reference code of EAGLE does this in Python loops.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class Tree:
    """Candidates of all steps, before the best N - 1 are chosen.

    Attributes:
        tokens, scores, parents, depths: (B, all candidates); a parent is an index in here, -1 the
            root.
    """

    tokens: Tensor
    scores: Tensor
    parents: Tensor
    depths: Tensor


def choose(tree: Tree, root: Tensor, nodes: int) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, parents and depths (B, N) of the root (B, 1) and the best N - 1 candidates.

    A child is never more probable than its parent and stands behind it, so with a stable order
    among equals the parent of a chosen node is chosen too.
    """
    ranked = tree.scores.sort(dim=-1, descending=True, stable=True).indices
    best = ranked[:, : nodes - 1].sort(dim=-1).values
    tokens = torch.cat((root, tree.tokens.gather(1, best)), dim=1)
    depths = torch.cat((torch.zeros_like(root), tree.depths.gather(1, best)), dim=1)
    above = tree.parents.gather(1, best)
    parents = torch.where(above < 0, 0, torch.searchsorted(best, above.clamp_min(0)) + 1)
    return tokens, torch.cat((torch.zeros_like(root), parents), dim=1), depths


def ancestors(parents: Tensor, steps: int) -> Tensor:
    """Whether a node (B, N, 1) sees another (B, 1, N): itself and its ancestors."""
    batch, nodes = parents.shape
    seen = torch.eye(nodes, dtype=torch.bool, device=parents.device).expand(batch, nodes, nodes)
    for _ in range(steps):
        seen = seen | seen.gather(1, parents[..., None].expand_as(seen))
    return seen


def additive_mask(
    seen: Tensor, context: int, dtype: torch.dtype, window: int | None = None
) -> Tensor:
    """What is added to scores (B, 1, R, C + E): 0 where a row sees an entry, -inf elsewhere.

    Args:
        seen: (B, R, E), entries behind the context that a row sees.
        context: C entries in front of these; all are seen, or the last ``window``.
        dtype: of the scores.
        window: of a layer with a sliding window.
    """
    batch, rows, entries = seen.shape
    size = (batch, 1, rows, context + entries)
    mask = torch.full(size, float("-inf"), device=seen.device, dtype=dtype)
    mask[..., max(0, context - window) if window else 0 : context] = 0
    mask[..., context:].masked_fill_(seen[:, None], 0)
    return mask


def accept(tokens: Tensor, parents: Tensor, logits: Tensor, steps: int) -> tuple[Tensor, Tensor]:
    """Greedy acceptance: tokens and nodes (B, S + 1) of the path, -1 behind its end.

    Args:
        tokens, parents: (B, N).
        logits: (B, N, V) of the target.
        steps: how deep the tree can be.
    """
    wanted = logits.argmax(dim=-1)
    node = torch.zeros_like(tokens[:, :1])
    alive = torch.ones_like(node, dtype=torch.bool)
    path, nodes = [], []
    for _ in range(steps + 1):
        token = wanted.gather(1, node)
        path.append(torch.where(alive, token, -1))
        nodes.append(torch.where(alive, node, -1))
        fits = (parents == node) & (tokens == token)
        fits[:, 0] = False
        child = fits.to(torch.int64).argmax(dim=1, keepdim=True)
        alive = alive & fits.any(dim=1, keepdim=True)
        node = torch.where(alive, child, node)
    return torch.cat(path, dim=1), torch.cat(nodes, dim=1)
