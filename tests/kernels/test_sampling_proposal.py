"""Drawn proposals: the kernel equals the reference, and its lists fit a built tree."""

import pytest
import torch

from frspec_kernels import tree
from frspec_kernels.reduced_topk import reduced_vocab_topk
from frspec_kernels.sampling_proposal import Children, draw_children, lists_of_tree
from frspec_kernels.sampling_proposal_reference import (
    draw_children_on_cpu,
    draw_children_reference,
)
from frspec_kernels.tree_reference import build_tree_reference, grow_tree_reference
from tests.kernels.sampling_problem import DEVICE


def lists(rows, width, seed, vocab=1000):
    g = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(rows, vocab, generator=g)
    best = logits.softmax(-1).topk(width)
    return best.values.contiguous(), best.indices.contiguous()


def empty(rows, width, children):
    return Children(
        torch.full((rows, children), -1, device=DEVICE),
        torch.full((rows, children), torch.nan, device=DEVICE),
        torch.full((rows, width), torch.nan, device=DEVICE),
    )


def assert_same_children(got, expected):
    assert torch.equal(got.token_ids.cpu(), expected.token_ids)
    torch.testing.assert_close(got.q.cpu(), expected.q, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(got.scores.cpu(), expected.scores, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("width", "children", "fixed"), [(64, 10, 9), (8, 4, 3), (5, 5, 0), (33, 6, 2), (2, 1, 0)]
)
def test_children_equal_the_reference(width, children, fixed):
    batch, beams = 3, 4
    probs, ids = lists(batch * beams, width, width)
    temperatures = torch.tensor([1.0, 0.6, 0.0])
    seeds, lens = torch.tensor([5, -7, 1 << 50]), torch.tensor([1, 800, 77])
    out = empty(batch * beams, width, children)
    got = draw_children(
        probs.to(DEVICE), ids.to(DEVICE), temperatures.to(DEVICE), seeds.to(DEVICE),
        lens.to(DEVICE), 2, children=children, fixed=fixed, out=out,
    )  # fmt: skip
    assert_same_children(
        got,
        draw_children_on_cpu(
            probs, ids, temperatures, seeds, lens, 2, children=children, fixed=fixed
        ),
    )
    for row in range(batch * beams):
        b = row // beams
        tokens, scores, q = draw_children_reference(
            probs[row], ids[row], float(temperatures[b]), int(seeds[b]), int(lens[b]), 2,
            row % beams, children, fixed,
        )  # fmt: skip
        assert got.token_ids[row].tolist() == tokens
        torch.testing.assert_close(got.q[row].cpu().double(), q, rtol=1e-5, atol=1e-7)
        expected = torch.tensor(scores, dtype=torch.float64)
        torch.testing.assert_close(got.scores[row].cpu().double(), expected, rtol=1e-5, atol=1e-6)


def test_children_follow_their_request_into_any_batch():
    """Alone and in another order: the same tokens, scores and q, bit for bit."""
    batch, beams, width = 6, 4, 32
    probs, ids = lists(batch * beams, width, 3)
    heat, seeds, lens = torch.full((batch,), 0.9), torch.arange(batch) - 3, torch.arange(batch) + 9

    def draw(which):
        rows = (torch.tensor(which)[:, None] * beams + torch.arange(beams)).flatten()
        found = draw_children(
            probs[rows].to(DEVICE), ids[rows].to(DEVICE), heat[which].to(DEVICE),
            seeds[which].to(DEVICE), lens[which].to(DEVICE), 1, children=5, fixed=3,
            out=empty(len(rows), width, 5),
        )  # fmt: skip
        return [tensor.cpu().view(len(which), beams, -1) for tensor in found]

    whole = draw(list(range(batch)))
    for which in ([4, 1, 5, 0, 3, 2], [3], [2, 2]):
        for own, of_all in zip(draw(which), whole, strict=True):
            assert torch.equal(own, of_all[which])


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("width", "vocab", "dtype"),
    [
        (576, 32768, torch.float16), (576, 8192, torch.float16), (4096, 32768, torch.bfloat16),
    ],
)  # fmt: skip
def test_heads_lists_and_draws_are_the_same_bits_in_any_batch(width, vocab, dtype):
    """What a seeded reply needs beside the model: launches follow the batch, numbers do not."""
    g = torch.Generator("cuda").manual_seed(1)
    options = {"generator": g, "device": "cuda", "dtype": dtype}
    hidden = torch.randn(512, width, **options)
    head = torch.randn(vocab, width, **options) * 3 / width**0.5
    ids, heat = torch.arange(vocab, device="cuda"), torch.ones(512, device="cuda")
    seeds = torch.arange(512, device="cuda")

    def propose(part):
        best = reduced_vocab_topk(hidden[part], head, 32, token_map=ids)
        drawn = draw_children(
            best.probs, best.token_ids, heat[part], seeds[part], seeds[part] + 40, 0,
            children=4, fixed=3,
        )  # fmt: skip
        return *best, *drawn

    whole = propose(slice(0, 512))
    for rows in (1, 4, 16, 17, 32, 33, 64, 128):
        for start in range(0, 512 - rows + 1, rows):
            part = slice(start, start + rows)
            for own, of_all in zip(propose(part), whole, strict=True):
                assert torch.equal(own, of_all[part]), (rows, start)


def test_missing_candidates_come_last():
    probs = torch.tensor([[0.7, 0.2, 0.0, 0.0]], device=DEVICE)
    ids = torch.tensor([[9, 4, 3, 2]], device=DEVICE)
    one = torch.ones(1, device=DEVICE)
    zero = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    got = draw_children(probs, ids, one, zero, zero, 0, children=4, fixed=1)
    assert got.token_ids[0].tolist() == [9, 4, 3, 2]
    assert got.scores[0, 2:].tolist() == [0.0, 0.0]
    expected = draw_children_on_cpu(
        probs.cpu(), ids.cpu(), one.cpu(), zero.cpu(), zero.cpu(), 0, children=4, fixed=1
    )
    assert_same_children(got, expected)


def test_at_a_low_temperature_what_is_left_is_taken_in_order():
    """0.9 : 1e-3 is 10^-118 at T = 1/40, and 0.9 : 0.1 is 10^-38.2: neither is drawn from."""
    probs = torch.tensor([[0.9, 0.5, 0.1, 1e-3, 1e-4], [0.9, 0.88, 0.86, 0.1, 1e-3]])
    ids = torch.tensor([[9, 4, 3, 2, 8], [5, 1, 7, 0, 6]])
    temperatures, lens = torch.full((2,), 0.025), torch.tensor([3, 4])
    expected = draw_children_on_cpu(probs, ids, temperatures, lens, lens, 0, children=4, fixed=1)
    probs_there, ids_there, cold, here = (x.to(DEVICE) for x in (probs, ids, temperatures, lens))
    got = draw_children(probs_there, ids_there, cold, here, here, 0, children=4, fixed=1)
    assert_same_children(got, expected)
    assert got.token_ids[0].tolist() == [9, 4, 3, 2]
    assert got.token_ids[1, 3] == 0
    assert got.scores[:, 3].tolist() == [0, 0]
    assert (got.q.cpu() == 0).tolist() == [
        [False, False, True, True, True],
        [False] * 3 + [True] * 2,
    ]
    for row in range(2):
        tokens, scores, q = draw_children_reference(
            probs[row], ids[row], 0.025, int(lens[row]), int(lens[row]), 0, 0, 4, 1
        )
        assert got.token_ids[row].tolist() == tokens
        assert got.scores[row].tolist() == pytest.approx(scores, abs=1e-6)
        torch.testing.assert_close(got.q[row].cpu().double(), q, rtol=1e-5, atol=1e-7)


def test_a_greedy_request_proposes_what_the_head_found_best():
    """Children and scores of a step without a draw, bit for bit."""
    probs, ids = lists(6, 8, 3)
    zero = torch.zeros(2, device=DEVICE)
    lens = torch.tensor([4, 9], device=DEVICE)
    got = draw_children(probs.to(DEVICE), ids.to(DEVICE), zero, lens, lens, 1, children=4, fixed=3)
    assert torch.equal(got.token_ids.cpu(), ids[:, :4])
    assert torch.equal(got.scores.cpu(), probs[:, :4])


def test_lists_of_a_built_tree():
    """Each drawn node's list is that of the beam which proposed it, in which its token stands."""
    shape = tree.TreeShape(top_k=3, steps=3, nodes=14)
    batch, width, fixed = 2, 6, 2
    candidates = tree.empty_candidates(shape, batch, "cpu")
    ids, q = [], []
    for step in range(shape.steps):
        rows = batch * (1 if step == 0 else shape.top_k)
        probs, tokens = lists(rows, width, step)
        got = draw_children(
            probs.to(DEVICE), tokens.to(DEVICE), torch.ones(batch, device=DEVICE),
            torch.arange(batch, device=DEVICE), torch.arange(batch, device=DEVICE), step,
            children=3, fixed=fixed,
        )  # fmt: skip
        grow_tree_reference(candidates, shape, step, got.scores.cpu(), got.token_ids.cpu())
        ids.append(tokens.view(batch, -1, width))
        q.append(got.q.cpu().view(batch, -1, width))
    built = build_tree_reference(
        candidates, shape, torch.zeros(batch, dtype=torch.int64), torch.arange(batch)
    )
    found = lists_of_tree(
        built.selected, built.parents, torch.cat(ids, 1), torch.cat(q, 1), children=3, fixed=fixed
    )
    places = (built.selected % 3).tolist()
    drawn_nodes = 0
    for b in range(batch):
        for node in range(1, shape.nodes):
            drawn = places[b][node - 1] >= fixed
            assert int(found.drawn[b, node]) == drawn
            if drawn:
                drawn_nodes += 1
                row = int(found.rows[b, built.parents[b, node]])
                token = built.tokens[b, node]
                assert int((found.ids[b, row, fixed:] == token).sum()) == 1
        leaves = set(range(shape.nodes)) - set(built.parents[b].tolist())
        assert all(int(found.rows[b, leaf]) == -1 for leaf in leaves)
    assert drawn_nodes > 2


def test_which_places_are_verified_does_not_depend_on_the_tokens():
    """Scores full of ties, the same under other tokens: the same candidates are selected."""
    shape = tree.TreeShape(top_k=4, steps=3, nodes=12)
    g = torch.Generator().manual_seed(5)
    batch = 40 if DEVICE == "cuda" else 5
    candidates = tree.empty_candidates(shape, batch, "cpu")
    for step in range(shape.steps):
        rows = batch * (1 if step == 0 else shape.top_k)
        scores = torch.randint(1, 4, (rows, shape.top_k), generator=g) / 4
        ids = torch.randperm(1000, generator=g)[: shape.top_k].expand(rows, -1).contiguous()
        grow_tree_reference(candidates, shape, step, scores, ids)
    zero = torch.zeros(batch, dtype=torch.int64, device=DEVICE)

    def selected(tokens, ties_by_place):
        other = candidates._replace(tokens=tokens)
        there = tree.Candidates(*(x.to(DEVICE) for x in other))
        built = tree.build_tree(there, shape, zero, zero, ties_by_place=ties_by_place)
        expected = build_tree_reference(other, shape, zero.cpu(), zero.cpu(), ties_by_place)
        for got, wanted in zip(built, expected, strict=True):
            assert torch.equal(got.cpu(), wanted)
        return built.selected

    one, another = torch.randint(0, 1 << 20, (2, *candidates.tokens.shape), generator=g)
    assert torch.equal(selected(one, True), selected(another, True))
    assert not torch.equal(selected(one, False), selected(another, False))


@pytest.mark.parametrize(
    ("children", "fixed"), [(9, 0), (3, 3), (3, -1)], ids=["too many", "none drawn", "negative"]
)
def test_sizes_that_do_not_fit(children, fixed):
    probs, ids = lists(2, 8, 0)
    one, zero = torch.ones(2), torch.zeros(2, dtype=torch.int64)
    with pytest.raises(ValueError, match="fixed < children <= candidates"):
        draw_children(probs, ids, one, zero, zero, 0, children=children, fixed=fixed)


def test_rows_that_do_not_fit_the_batch():
    probs, ids = lists(3, 8, 0)
    one, zero = torch.ones(2), torch.zeros(2, dtype=torch.int64)
    with pytest.raises(ValueError, match="for B = 2"):
        draw_children(probs, ids, one, zero, zero, 0, children=2, fixed=1)
    with pytest.raises(TypeError, match="seeds"):
        draw_children(probs[:2], ids[:2], one, one, zero, 0, children=2, fixed=1)
