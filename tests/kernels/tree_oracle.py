"""The draft tree by plain loops over objects, and random rounds to try it on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import torch

from frspec_kernels import tree

VOCAB = 500


@dataclass(eq=False)
class Node:
    """A proposed token; ``index`` counts proposals in the order they are made."""

    score: np.float32
    step: int
    token: int
    index: int
    parent: Node | None = None
    children: list[Node] = field(default_factory=list)


def believed(prob: float) -> np.float32:
    """NaN and what is below 0 as 0, what is above 1 as 1."""
    return np.float32(min(prob, 1.0) if prob > 0 else 0.0)


def grow(shape, probs, tokens, request) -> tuple[list[Node], list[list[Node]]]:
    """All candidates of a request, and the beams after each step but the last."""
    everything: list[Node] = []
    history: list[list[Node]] = []
    beams: Sequence[Node | None] = [None]
    for step in range(shape.steps):
        children: list[Node] = []
        for rank, beam in enumerate(beams):
            row = request * len(beams) + rank
            for p, token in zip(probs[step][row].tolist(), tokens[step][row].tolist(), strict=True):
                score = believed(p) if beam is None else beam.score * believed(p)
                children.append(Node(score, step, token, len(everything) + len(children), beam))
        everything += children
        best = sorted(children, key=lambda c: (-c.score, c.token, c.index)) if step else children
        history.append(best[: shape.top_k])
        beams = history[-1]
    return everything, history[:-1]


def choose(shape, everything: list[Node]) -> list[Node | None]:
    """The nodes of the final tree in order; None is the root."""
    ranked = sorted(everything, key=lambda c: (-c.score, c.step, c.token, c.index))
    drafted = sorted(ranked[: shape.nodes - 1], key=lambda c: c.index)
    return [None, *drafted]


def sees(nodes: list[Node | None], i: int) -> list[int]:
    """Which nodes node ``i`` sees: itself and its ancestors up to the root."""
    seen, at = {i, 0}, nodes[i]
    while at is not None and at.parent is not None:
        at = at.parent
        seen.add(nodes.index(at))
    return sorted(seen)


def unpack(words: torch.Tensor, nodes: int) -> list[list[int]]:
    """Node numbers whose bits are set, for each row of mask words."""
    column = torch.arange(nodes, device=words.device)
    bits = (words[:, column // 32] >> (column % 32).int()) & 1
    return [row.nonzero().flatten().tolist() for row in bits]


def longest_agreeing_path(tokens, parents, target) -> list[int]:
    """Every path from the root, tried; the longest on which each draft is what the target said."""
    best = [0]
    for end in range(len(tokens)):
        path = [end]
        while path[0] != 0:
            path.insert(0, parents[path[0]])
        steps = pairwise(path)
        agrees = all(tokens[child] == target[parent] for parent, child in steps)
        if agrees and len(path) > len(best):
            best = path
    return best


def random_round(shape, batch, seed, *, levels=0, strange=False, device="cpu"):
    """Probabilities and distinct token ids of each step.

    ``levels`` rounds the probabilities to so many values, for ties; ``strange`` adds NaN, infinite,
    negative and too large ones.
    """
    generator = torch.Generator().manual_seed(seed)
    probs, tokens = [], []
    for step in range(shape.steps):
        rows = batch if step == 0 else batch * shape.top_k
        p = torch.rand(rows, shape.top_k, generator=generator)
        if levels:
            p = (p * levels).round() / levels
        if strange:
            odd = torch.tensor([float("nan"), float("-inf"), float("inf"), -0.5, -0.0, 1.5])
            pick = torch.randint(odd.numel(), p.shape, generator=generator)
            p = torch.where(torch.rand(p.shape, generator=generator) < 0.3, odd[pick], p)
        few = torch.rand(rows, 2 * shape.top_k + 3, generator=generator).argsort(1)
        probs.append(p.to(device))
        tokens.append(few[:, : shape.top_k].contiguous().to(device))
    return probs, tokens


def poisoned_candidates(shape, batch, device="cpu"):
    """Outputs in which anything left unset shows."""
    candidates = tree.empty_candidates(shape, batch, device)
    candidates.scores.fill_(float("nan"))
    candidates.tokens.fill_(-77)
    candidates.parents.fill_(-77)
    return candidates


def poison(outputs):
    """Fill every output with a value that is never right, and return them."""
    for tensor in outputs:
        if tensor is not None:
            tensor.fill_(float("nan") if tensor.is_floating_point() else -77)
    return outputs


def built(shape, batch, seed, *, levels=0, strange=False, device="cpu"):
    """A random round through the kernels: probs, tokens, candidates, tree, (roots, lengths)."""
    probs, tokens = random_round(shape, batch, seed, levels=levels, strange=strange, device=device)
    candidates = poisoned_candidates(shape, batch, device)
    for step in range(shape.steps):
        tree.grow_tree(candidates, shape, step, probs[step], tokens[step])
    generator = torch.Generator().manual_seed(seed + 1)
    roots = torch.randint(VOCAB, (batch,), generator=generator).to(device)
    seq_lens = torch.randint(1, 3000, (batch,), generator=generator).to(device)
    out = poison(tree.empty_tree(shape, batch, device))
    tree.build_tree(candidates, shape, roots, seq_lens, out=out)
    return probs, tokens, candidates, out, (roots, seq_lens)


def target_for(built_tree, seed, agreement):
    """``[B, N]`` target tokens that name one of a node's children with this probability."""
    generator = torch.Generator().manual_seed(seed)
    tokens, parents = built_tree.tokens.cpu(), built_tree.parents.cpu()
    target = torch.randint(VOCAB, tokens.shape, generator=generator)
    for b in range(tokens.shape[0]):
        for child in torch.randperm(tokens.shape[1] - 1, generator=generator).tolist():
            if torch.rand(1, generator=generator) < agreement:
                target[b, parents[b, child + 1]] = tokens[b, child + 1]
    return target.to(built_tree.tokens.device)
