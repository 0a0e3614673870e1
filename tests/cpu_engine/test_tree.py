"""Tree build and greedy acceptance against oracles that try whole paths."""

import itertools
import random
from dataclasses import dataclass, field

import pytest
import torch

QLEN_ONLY = 1
GARBAGE = -77


@dataclass
class Drafted:
    """One request's draft: every candidate's parent candidate (None: the root), and the choice."""

    parents: list[int | None] = field(default_factory=list)
    group_parents: list[int] = field(default_factory=list)
    selected: list[int] = field(default_factory=list)

    def node_parents(self) -> list[int | None]:
        """Parent node of each node: None for the root and for a node whose parent is missing."""
        node_of = {candidate: i + 1 for i, candidate in enumerate(self.selected)}
        nodes: list[int | None] = [None]
        for candidate in self.selected:
            parent = self.parents[candidate]
            nodes.append(0 if parent is None else node_of.get(parent))
        return nodes


def draft(draw: random.Random, top_k: int, steps: int, nodes: int, closed: bool) -> Drafted:
    """Expand ``top_k`` beams ``steps`` times, as EAGLE-2 does, and choose ``nodes - 1``."""
    drafted = Drafted(group_parents=[-1])
    scores: list[float] = []

    def add(parent: int | None) -> int:
        above = 0.0 if parent is None else scores[parent]
        scores.append(above - draw.random() - 0.01)
        drafted.parents.append(parent)
        return len(scores) - 1

    level = [add(None) for _ in range(top_k)]
    for _ in range(steps - 1):
        drafted.group_parents += level
        children = [add(parent) for parent in level for _ in range(top_k)]
        level = sorted(children, key=lambda c: -scores[c])[:top_k]
    everything = list(range(len(scores)))
    if closed:
        chosen = sorted(everything, key=lambda c: -scores[c])[: nodes - 1]
    else:
        chosen = draw.sample(everything, nodes - 1)
    drafted.selected = sorted(chosen)
    return drafted


def build(tree, drafts: list[Drafted], lengths: list[int], top_k: int, steps: int, nodes: int):
    batch = len(drafts)
    out = {
        "tree_mask": torch.randint(0, 2, (batch * nodes * nodes + 5,)).bool(),
        "positions": torch.full((batch * nodes,), GARBAGE),
        "retrieve_index": torch.full((batch, nodes), GARBAGE),
        "retrieve_next_token": torch.full((batch, nodes), GARBAGE),
        "retrieve_next_sibling": torch.full((batch, nodes), GARBAGE),
    }
    tail = out["tree_mask"][batch * nodes * nodes :].clone()
    tree.build_tree_kernel_efficient_cpu(
        torch.tensor([d.group_parents for d in drafts]),
        torch.tensor([d.selected for d in drafts]),
        torch.tensor(lengths),
        *out.values(),
        top_k,
        steps,
        nodes,
        QLEN_ONLY,
    )
    assert torch.equal(out["tree_mask"][batch * nodes * nodes :], tail)
    return out


def path_to_root(parents: list[int | None], node: int) -> list[int]:
    path = [node]
    while (parent := parents[path[-1]]) is not None:
        path.append(parent)
    return path


SHAPES = [(1, 1, 2), (1, 5, 6), (2, 1, 3), (2, 3, 6), (4, 4, 16), (3, 6, 40), (8, 3, 61)]


@pytest.mark.parametrize(("top_k", "steps", "nodes"), SHAPES)
@pytest.mark.parametrize("closed", [True, False], ids=["best", "any"])
@pytest.mark.parametrize("seed", range(5))
def test_build_matches_paths(tree, top_k, steps, nodes, closed, seed):
    draw = random.Random(seed)
    lengths = [draw.randrange(1, 5000) for _ in range(3)]
    drafts = [draft(draw, top_k, steps, nodes, closed) for _ in lengths]
    out = build(tree, drafts, lengths, top_k, steps, nodes)
    masks = out["tree_mask"][: 3 * nodes * nodes].view(3, nodes, nodes)
    for b, drafted in enumerate(drafts):
        parents = drafted.node_parents()
        assert out["retrieve_index"][b].tolist() == list(range(b * nodes, (b + 1) * nodes))
        linked = [n for n in range(nodes) if path_to_root(parents, n)[-1] == 0]
        for node in linked:
            path = path_to_root(parents, node)
            assert masks[b, node].nonzero().flatten().tolist() == sorted(path)
            assert out["positions"][b * nodes + node] == lengths[b] + len(path) - 1
        assert children_by_links(out, b) == {
            parent: [n for n in range(nodes) if parents[n] == parent] for parent in range(nodes)
        }


def children_by_links(out, b: int) -> dict[int, list[int]]:
    first = out["retrieve_next_token"][b].tolist()
    following = out["retrieve_next_sibling"][b].tolist()
    children: dict[int, list[int]] = {}
    for parent, child in enumerate(first):
        children[parent] = []
        while child != -1:
            children[parent].append(child)
            child = following[child]
    return children


@pytest.mark.parametrize(("top_k", "steps", "nodes"), SHAPES)
@pytest.mark.parametrize("vocab", [2, 4])
@pytest.mark.parametrize("seed", range(6))
def test_acceptance_is_the_longest_agreeing_path(tree, top_k, steps, nodes, vocab, seed):
    draw = random.Random(seed)
    batch = 4
    drafts = [draft(draw, top_k, steps, nodes, draw.random() < 0.7) for _ in range(batch)]
    out = build(tree, drafts, [7] * batch, top_k, steps, nodes)
    candidates = torch.tensor([[draw.randrange(vocab) for _ in range(nodes)] for _ in drafts])
    target = torch.tensor([[draw.randrange(vocab) for _ in range(nodes)] for _ in drafts])
    for b, drafted in enumerate(drafts):  # a draft proposes distinct tokens after each node
        make_siblings_distinct(candidates[b], drafted.node_parents(), vocab)
    predicts = torch.full((batch * nodes,), GARBAGE, dtype=torch.int32)
    accept_index = torch.full((batch, steps + 1), -1, dtype=torch.int32)
    accepted = torch.full((batch,), GARBAGE, dtype=torch.int32)
    tree.verify_tree_greedy_cpu(
        predicts,
        accept_index,
        accepted,
        candidates,
        out["retrieve_index"],
        out["retrieve_next_token"],
        out["retrieve_next_sibling"],
        target,
    )
    expected_predicts = torch.full_like(predicts, GARBAGE)
    for b, drafted in enumerate(drafts):
        path = longest_agreeing_path(drafted.node_parents(), candidates[b], target[b])
        assert accepted[b] == len(path) - 1
        rows = [b * nodes + node for node in path]
        assert accept_index[b].tolist() == rows + [-1] * (steps + 1 - len(rows))
        expected_predicts[rows] = target[b, path].int()
    assert torch.equal(predicts, expected_predicts)


def make_siblings_distinct(tokens: torch.Tensor, parents: list[int | None], vocab: int) -> None:
    taken: dict[int | None, int] = {}
    for node, parent in enumerate(parents[1:], start=1):
        rank = taken.get(parent, 0)
        taken[parent] = rank + 1
        if rank:  # ids past the target's range stand for other tokens
            tokens[node] = vocab + rank


def longest_agreeing_path(
    parents: list[int | None], tokens: torch.Tensor, target: torch.Tensor
) -> list[int]:
    """Try every node: does each step from the root to it agree with the target?"""
    best: list[int] = [0]
    for node in range(len(parents)):
        path = path_to_root(parents, node)[::-1]
        agrees = all(tokens[b] == target[a] for a, b in itertools.pairwise(path))
        if path[0] == 0 and agrees and len(path) > len(best):
            best = path
    return best


def test_other_mask_layouts_are_refused(tree):
    nothing = torch.zeros(1)
    with pytest.raises(NotImplementedError, match=r"tree_mask_mode 0.*frspec_cpu"):
        tree.build_tree_kernel_efficient_cpu(*[nothing] * 8, 1, 1, 2, 0)
