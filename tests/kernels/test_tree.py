# pyright: reportArgumentType=false
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from frspec_kernels import tree
from frspec_kernels.tree import TreeShape
from frspec_kernels.tree_args import MAX_TOKEN_ID
from frspec_kernels.tree_reference import build_tree_reference, grow_tree_reference
from tests.kernels.tree_oracle import (
    VOCAB,
    built,
    choose,
    grow,
    poison,
    poisoned_candidates,
    random_round,
    sees,
    unpack,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SMALL = [
    TreeShape(1, 1, 2),
    TreeShape(1, 5, 4),
    TreeShape(2, 2, 3),
    TreeShape(3, 3, 22),  # every candidate
    TreeShape(4, 3, 16),
    TreeShape(3, 5, 34),  # two words
    TreeShape(5, 1, 6),
]
LARGE = [TreeShape(10, 6, 60), TreeShape(16, 4, 200), TreeShape(32, 2, 65), TreeShape(1, 16, 17)]
# The interpreter takes a second for 100 candidates: few large trees, in the hardest kind.
INTERPRETED = [TreeShape(10, 6, 60), TreeShape(7, 4, 150), TreeShape(1, 16, 17)]
KINDS = ("random", "ties", "strange")
CASES = [(shape, kind, 3) for shape in SMALL for kind in KINDS] + (
    [(shape, "ties", 1) for shape in INTERPRETED]
    if DEVICE == "cpu"
    else [(shape, kind, 3) for shape in LARGE for kind in KINDS]
)


@st.composite
def shapes(draw):
    top_k, steps = draw(st.integers(1, 5)), draw(st.integers(1, 4))
    candidates = top_k + (steps - 1) * top_k**2
    return TreeShape(top_k, steps, draw(st.integers(2, candidates + 1)))


def assert_same(got, expected):
    for name, a, b in zip(got._fields, got, expected, strict=True):
        assert (a is None) == (b is None), name
        if a is not None:
            assert a.dtype == b.dtype, name
            torch.testing.assert_close(a, b, rtol=0, atol=0, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize(("shape", "kind", "batch"), CASES, ids=repr)
def test_growth_and_build_equal_the_reference(shape, kind, batch):
    probs, tokens = random_round(
        shape, batch, 5, levels=3 * (kind == "ties"), strange=kind == "strange", device=DEVICE
    )
    ours, theirs = (poisoned_candidates(shape, batch, DEVICE) for _ in range(2))
    for step in range(shape.steps):
        rows = batch if step == 0 else batch * shape.top_k
        hidden = torch.randn(rows, 40, device=DEVICE)[:, :37].bfloat16()
        out = poison(tree.empty_beams(shape, batch, DEVICE, hidden_size=37))
        got = tree.grow_tree(ours, shape, step, probs[step], tokens[step], hidden=hidden, out=out)
        expected = grow_tree_reference(theirs, shape, step, probs[step], tokens[step], hidden)
        assert (got is None) == (expected is None) == (step == shape.steps - 1)
        if got is not None:
            assert_same(got, expected)
    assert_same(ours, theirs)
    roots, lens = torch.tensor([7, 0, 9][:batch], device=DEVICE), torch.full((batch,), 11)
    lens = lens.to(DEVICE)
    out = poison(tree.empty_tree(shape, batch, DEVICE))
    got = tree.build_tree(ours, shape, roots, lens, out=out)
    assert_same(got, build_tree_reference(theirs, shape, roots, lens))


@pytest.mark.parametrize("levels", [0, 2, 4])
@pytest.mark.parametrize("shape", SMALL, ids=repr)
def test_the_reference_equals_the_loops_on_thousands_of_trees(shape, levels):
    """21 × 150 trees; the kernels equal the reference by the test above."""
    batch = 150
    probs, tokens = random_round(shape, batch, levels, levels=levels, strange=levels == 2)
    candidates = poisoned_candidates(shape, batch)
    for step in range(shape.steps):
        grow_tree_reference(candidates, shape, step, probs[step], tokens[step])
    roots, lens = torch.arange(batch), torch.arange(batch) + 3
    out = build_tree_reference(candidates, shape, roots, lens)
    assert_equals_loops(shape, probs, tokens, candidates, out, roots, lens)


@pytest.mark.gpu
@pytest.mark.parametrize("levels", [0, 3])
@pytest.mark.parametrize("shape", [*SMALL, *LARGE], ids=repr)
def test_the_kernels_equal_the_loops_on_thousands_of_trees(shape, levels):
    batch = 40 if shape in LARGE else 300
    probs, tokens, candidates, out, (roots, lens) = built(
        shape, batch, levels, levels=levels, device="cuda"
    )
    assert_equals_loops(shape, probs, tokens, candidates, out, roots, lens)


def assert_equals_loops(shape, probs, tokens, candidates, out, roots, lens):
    cpu = torch.device("cpu")
    candidates = tree.Candidates(*(t.to(cpu) for t in candidates))
    out = tree.BuiltTree(*(t.to(cpu) for t in out))
    probs, tokens = [p.to(cpu) for p in probs], [t.to(cpu) for t in tokens]
    for b in range(roots.numel()):
        everything, beams = grow(shape, probs, tokens, b)
        assert candidates.scores[b].tolist() == [float(c.score) for c in everything]
        assert candidates.tokens[b].tolist() == [c.token for c in everything]
        followed = [c.index for step in beams for c in step]
        assert candidates.parents[b].tolist() == [-1, *followed]
        nodes = choose(shape, everything)
        drafted = [c for c in nodes if c is not None]
        assert out.selected[b].tolist() == [c.index for c in drafted]
        assert out.tokens[b].tolist() == [int(roots[b]), *(c.token for c in drafted)]
        parents = [nodes.index(c.parent) for c in drafted]
        assert out.parents[b].tolist() == [-1, *parents]
        rows = slice(b * shape.nodes, (b + 1) * shape.nodes)
        depths = [0, *(c.step + 1 for c in drafted)]
        assert out.depths[rows].tolist() == depths
        assert out.positions[rows].tolist() == [int(lens[b]) + d for d in depths]
        assert unpack(out.mask[rows], shape.nodes) == [sees(nodes, i) for i in range(len(nodes))]
        assert out.retrieve_index[b].tolist() == list(range(rows.start, rows.stop))
        families = [[i + 1 for i, p in enumerate(parents) if p == n] for n in range(shape.nodes)]
        assert out.next_token[b].tolist() == [f[0] if f else -1 for f in families]
        following = {a: b for f in families for a, b in pairwise(f)}
        assert out.next_sibling[b].tolist() == [following.get(n, -1) for n in range(shape.nodes)]


@settings(max_examples=12, deadline=None)
@given(shape=shapes(), seed=st.integers(0, 2**30), levels=st.integers(0, 3), strange=st.booleans())
def test_every_tree_is_a_tree(shape, seed, levels, strange):
    _, _, candidates, out, _ = built(shape, 2, seed, levels=levels, strange=strange, device=DEVICE)
    for b in range(2):
        parents, tokens = out.parents[b].tolist(), out.tokens[b].tolist()
        assert parents[0] == -1
        assert all(0 <= p < i for i, p in enumerate(parents) if i)  # parent before child
        siblings = [(p, t) for p, t in zip(parents[1:], tokens[1:], strict=True)]
        assert len({*siblings}) == len(siblings)
        mask = unpack(out.mask[b * shape.nodes : (b + 1) * shape.nodes], shape.nodes)
        for i, seen in enumerate(mask):
            closed = {i, *(mask[parents[i]] if i else [])}  # ancestors of ancestors
            assert {*seen} == closed
        scores = candidates.scores[b]
        kept = scores[out.selected[b]]
        left = [s for c, s in enumerate(scores.tolist()) if c not in out.selected[b].tolist()]
        assert not left or kept.min() >= max(left)
        assert reached_by_links(out, b) == [*range(shape.nodes)]


def reached_by_links(out, b):
    """Nodes that a walk along first children and siblings meets, sorted."""
    first, sibling = out.next_token[b].tolist(), out.next_sibling[b].tolist()
    met, todo = [0], [first[0]]
    while todo:
        at = todo.pop()
        if at != -1:
            met.append(at)
            todo += [first[at], sibling[at]]
    return sorted(met)


def test_equal_scores_take_the_shallower_then_the_smaller_token_then_the_better_parent():
    shape = TreeShape(2, 2, 4)
    candidates = poisoned_candidates(shape, 1, DEVICE)
    one = torch.ones(1, 2, device=DEVICE)
    tree.grow_tree(candidates, shape, 0, one, torch.tensor([[9, 8]], device=DEVICE))
    both = torch.tensor([[5, 4], [3, 5]], device=DEVICE)
    tree.grow_tree(candidates, shape, 1, torch.ones(2, 2, device=DEVICE), both)
    nothing = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    out = tree.build_tree(candidates, shape, nothing, nothing)
    assert out.tokens[0].tolist() == [0, 9, 8, 3]  # both parents although 3 and 4 are smaller ids
    assert out.parents[0].tolist() == [-1, 0, 0, 2]

    shape = TreeShape(2, 3, 4)
    candidates = poisoned_candidates(shape, 1, DEVICE)
    tree.grow_tree(candidates, shape, 0, one, torch.tensor([[9, 8]], device=DEVICE))
    beams = tree.grow_tree(
        candidates, shape, 1, torch.ones(2, 2, device=DEVICE),
        torch.tensor([[7, 5], [5, 6]], device=DEVICE),
    )  # fmt: skip
    assert beams is not None
    assert beams.tokens.tolist() == [5, 5]
    assert beams.rows.tolist() == [0, 1]  # the first parent's 5 before the second's


def test_probabilities_that_are_none_count_as_zero_or_one():
    shape = TreeShape(3, 1, 4)
    candidates = poisoned_candidates(shape, 2, DEVICE)
    inf, nan = float("inf"), float("nan")
    probs = torch.tensor([[nan, -inf, inf], [-1.0, 2.0, 0.25]], device=DEVICE)
    tree.grow_tree(candidates, shape, 0, probs, torch.tensor([[1, 2, 3]] * 2, device=DEVICE))
    assert candidates.scores.tolist() == [[0.0, 0.0, 1.0], [0.0, 1.0, 0.25]]


def test_equal_scores_of_a_deep_tree_take_the_shallowest():
    """All 16 steps tell apart in a key, so no deep candidate takes a shallow one's place."""
    shape = TreeShape(2, 16, 16)
    candidates = poisoned_candidates(shape, 1, DEVICE)
    for step in range(shape.steps):
        rows = 1 if step == 0 else 2
        tokens = torch.tensor([[3, 4]] * rows, device=DEVICE)
        tree.grow_tree(candidates, shape, step, torch.ones(rows, 2, device=DEVICE), tokens)
    nothing = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    out = tree.build_tree(candidates, shape, nothing, nothing)
    assert out.depths.tolist() == [0, 1, 1, *[2] * 4, *[3] * 4, *[4] * 4, 5]


def test_wide_hidden_states_are_copied_whole():
    shape = TreeShape(2, 2, 3)
    probs, tokens = random_round(shape, 2, 0, device=DEVICE)
    hidden = torch.randn(2, 4100, device=DEVICE)  # a program copies 2,048 elements at a time
    out = poison(tree.empty_beams(shape, 2, DEVICE, hidden_size=4100, dtype=torch.float32))
    candidates = poisoned_candidates(shape, 2, DEVICE)
    beams = tree.grow_tree(candidates, shape, 0, probs[0], tokens[0], hidden=hidden, out=out)
    assert beams is out
    assert out.hidden is not None
    assert torch.equal(out.hidden, hidden[[0, 0, 1, 1]])


def test_large_token_ids_survive():
    shape = TreeShape(2, 2, 6)
    top = MAX_TOKEN_ID - 1
    candidates = poisoned_candidates(shape, 1, DEVICE)
    first = torch.tensor([[top, 0]], device=DEVICE)
    tree.grow_tree(candidates, shape, 0, torch.full((1, 2), 0.5, device=DEVICE), first)
    later = torch.tensor([[top, 262_143], [0, top - 1]], device=DEVICE)
    tree.grow_tree(candidates, shape, 1, torch.full((2, 2), 0.5, device=DEVICE), later)
    ids = torch.tensor([3], device=DEVICE)
    out = tree.build_tree(candidates, shape, ids, ids)
    assert out.tokens[0].tolist() == [3, top, 0, 262_143, 0, top - 1]


@pytest.mark.parametrize("shape", [TreeShape(3, 3, 12), TreeShape(4, 3, 36)], ids=repr)
def test_byte_masks_are_sglangs(shape):
    batch, n = 3, shape.nodes
    _, _, candidates, out, (roots, _) = built(shape, batch, 3, device=DEVICE)
    lens = torch.tensor([5, 1, 9], device=DEVICE)
    rows = [unpack(out.mask[b * n : (b + 1) * n], n) for b in range(batch)]
    draft = torch.full((batch * n * n,), 7, dtype=torch.uint8, device=DEVICE)
    tree.build_tree(candidates, shape, roots, lens, draft_mask=draft)
    for b, row in np.ndindex(batch, n):
        assert draft.view(batch, n, n)[b, row].nonzero().flatten().tolist() == rows[b][row]
    assert int(draft.max()) == 1
    full = torch.ones(n * (15 + batch * n), dtype=torch.bool, device=DEVICE)
    tree.build_tree(candidates, shape, roots, lens, full_mask=full)
    start = 0
    for b, length in enumerate(lens.tolist()):
        width = length + n
        block = full[start : start + n * width].view(n, width)
        assert block[:, :length].all()
        got = [r.nonzero().flatten().tolist() for r in block[:, length:]]
        assert got == rows[b]
        start += n * width
    assert start == full.numel()


def test_nothing_for_no_requests():
    shape = TreeShape(2, 2, 4)
    _, _, candidates, out, _ = built(shape, 0, 1, device=DEVICE)
    assert candidates.scores.shape == (0, 6)
    assert out.tokens.shape == (0, 4)
    probs, tokens = random_round(shape, 0, 0, device=DEVICE)
    hidden = torch.empty(0, 8, device=DEVICE)
    beams = tree.grow_tree(candidates, shape, 0, probs[0], tokens[0], hidden=hidden)
    assert beams is not None
    assert beams.hidden is not None
    assert beams.hidden.shape == (0, 8)


def test_full_masks_of_more_requests_than_one_block_of_lengths():
    """A request's rows begin after all rows before it; 128 lengths are summed at a time."""
    shape, batch = TreeShape(1, 1, 2), 131
    candidates = tree.Candidates(
        torch.ones(batch, 1, device=DEVICE),
        torch.zeros(batch, 1, dtype=torch.int64, device=DEVICE),
        torch.full((batch, 1), -1, dtype=torch.int64, device=DEVICE),
    )
    lens = torch.arange(batch, device=DEVICE) % 5 + 1
    full = torch.full((2 * (int(lens.sum()) + 2 * batch),), 7, dtype=torch.uint8, device=DEVICE)
    tree.build_tree(candidates, shape, lens, lens, full_mask=full)
    expected = [
        n for length in lens.tolist() for n in [7] * length + [1, 0] + [7] * length + [1, 1]
    ]
    assert full.tolist() == expected


@pytest.mark.parametrize(
    ("sizes", "why"),
    [
        ((0, 2, 3), r"top_k is in \[1, 32\], got 0"),
        ((33, 2, 3), "top_k"),
        ((2, 17, 3), r"steps is in \[1, 16\], got 17"),
        ((2, 2, 8), r"nodes is in \[2, 7\] .* \(6 candidates"),
        ((2, 2, 1), "nodes"),
        ((32, 16, 1025), "1024"),
    ],
)
def test_impossible_shapes_are_refused(sizes, why):
    with pytest.raises(ValueError, match=why):
        TreeShape(*sizes)


@pytest.mark.parametrize("sizes", [(2.0, 2, 3), (2, "2", 3), (2, 2, torch.tensor(3))], ids=repr)
def test_sizes_that_are_no_ints_are_refused(sizes):
    with pytest.raises(TypeError, match=r"(top_k|steps|nodes) is an int, got (float|str|Tensor) "):
        TreeShape(*sizes)


def test_misfits_are_refused():
    shape = TreeShape(2, 2, 4)
    candidates = tree.empty_candidates(shape, 2, DEVICE)
    probs, tokens = random_round(shape, 2, 0, device=DEVICE)
    with pytest.raises(ValueError, match=r"step is in \[0, 2\), got 2"):
        tree.grow_tree(candidates, shape, 2, probs[1], tokens[1])
    with pytest.raises(TypeError, match="step is an int, got Tensor"):
        tree.grow_tree(candidates, shape, torch.tensor(1), probs[1], tokens[1])
    flat = candidates._replace(scores=candidates.scores.flatten())
    with pytest.raises(ValueError, match=r"candidates\.scores is \[B, 6\], got \[12\]"):
        tree.grow_tree(flat, shape, 0, probs[0], tokens[0])
    other = tree.empty_candidates(TreeShape(2, 3, 4), 2, DEVICE)
    with pytest.raises(ValueError, match=r"candidates\.scores is contiguous \[2, 6\], got \[2, 10"):
        tree.grow_tree(other, shape, 0, probs[0], tokens[0])
    int32 = candidates._replace(parents=candidates.parents.int())
    with pytest.raises(TypeError, match=r"candidates\.parents is torch\.int64"):
        tree.grow_tree(int32, shape, 0, probs[0], tokens[0])
    with pytest.raises(ValueError, match=r"beams\.tokens is contiguous \[4\], got \[2\]"):
        tree.grow_tree(
            candidates, shape, 0, probs[0], tokens[0], out=tree.empty_beams(shape, 1, DEVICE)
        )
    with pytest.raises(ValueError, match=r"probs is \[2, 2\]"):
        tree.grow_tree(candidates, shape, 0, probs[1], tokens[1])
    with pytest.raises(TypeError, match="float32"):
        tree.grow_tree(candidates, shape, 0, probs[0].bfloat16(), tokens[0])
    with pytest.raises(TypeError, match="int64"):
        tree.grow_tree(candidates, shape, 0, probs[0], tokens[0].int())
    hidden = torch.zeros(4, 8, device=DEVICE)
    beams = tree.empty_beams(shape, 2, DEVICE, hidden_size=8, dtype=torch.float32)
    shared = beams._replace(hidden=hidden)
    with pytest.raises(ValueError, match="share memory"):
        tree.grow_tree(candidates, shape, 0, probs[0], tokens[0], hidden=hidden[:2], out=shared)
    strided = beams._replace(hidden=torch.zeros(8, 4, device=DEVICE).T)
    with pytest.raises(ValueError, match=r"strides \[1, 4\]"):
        tree.grow_tree(candidates, shape, 0, probs[0], tokens[0], hidden=hidden[:2], out=strided)
    with pytest.raises(ValueError, match=r"token_ids is on meta"):
        tree.grow_tree(candidates, shape, 0, probs[0], tokens[0].to("meta"))
    with pytest.raises(ValueError, match=r"hidden is \[2, H\]"):
        tree.grow_tree(candidates, shape, 0, probs[0], tokens[0], hidden=hidden, out=beams)
    lens = torch.ones(2, dtype=torch.int64, device=DEVICE)
    with pytest.raises(ValueError, match="seq_lens"):
        tree.build_tree(candidates, shape, lens, lens[:1])
    with pytest.raises(ValueError, match="seq_lens is on meta"):
        tree.build_tree(candidates, shape, lens, lens.to("meta"))
    mask = torch.zeros(7, dtype=torch.bool, device=DEVICE)
    with pytest.raises(ValueError, match="at least 32"):
        tree.build_tree(candidates, shape, lens, lens, draft_mask=mask)
    with pytest.raises(ValueError, match="not both"):
        tree.build_tree(candidates, shape, lens, lens, draft_mask=mask, full_mask=mask)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [TreeShape(4, 3, 16), TreeShape(10, 6, 60)], ids=repr)
def test_a_graph_replays_with_new_inputs_and_a_padding_request(shape):
    batch = 5
    probs, tokens = random_round(shape, batch, 0, device="cuda")
    roots = torch.randint(VOCAB, (batch,), device="cuda")
    lens = torch.randint(1, 99, (batch,), device="cuda")
    candidates, out = (
        poisoned_candidates(shape, batch, "cuda"),
        tree.empty_tree(shape, batch, "cuda"),
    )
    beams = tree.empty_beams(shape, batch, "cuda")

    def a_round():
        for step in range(shape.steps):
            tree.grow_tree(candidates, shape, step, probs[step], tokens[step], out=beams)
        tree.build_tree(candidates, shape, roots, lens, out=out)

    a_round()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        a_round()
    for seed in (1, 2):
        new_probs, new_tokens = random_round(shape, batch, seed, levels=4, device="cuda")
        for old, new in zip((*probs, *tokens), (*new_probs, *new_tokens), strict=True):
            old.copy_(new)
        new_probs[0][-1] = probs[0][-1].fill_(float("nan"))  # a padding request
        lens.add_(17)
        poison(candidates)
        poison(out)
        graph.replay()
        expected = poisoned_candidates(shape, batch, "cuda")
        for step in range(shape.steps):
            grow_tree_reference(expected, shape, step, new_probs[step], new_tokens[step])
        assert_same(candidates, expected)
        assert_same(out, build_tree_reference(expected, shape, roots, lens))
