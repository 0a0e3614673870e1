"""The eager loop: its tree, masks and acceptance against plain Python, and its split."""

import dataclasses

import pytest
import torch

from bench.breakdown import eager_run
from bench.breakdown.eager_labels import CaptureError, eager_labels, graph_labels
from bench.breakdown.eager_loop import EagerLoop
from bench.breakdown.eager_model import family_of, rms_norm
from bench.breakdown.eager_tree import Tree, accept, additive_mask, ancestors, choose
from bench.breakdown.parts import PARTS
from bench.breakdown.ranges import annotated, unmarked
from sgl_frspec.explain import ModelShape, Speculation

SHAPE = ModelShape(
    hidden=32,
    intermediate=48,
    layers=3,
    heads=4,
    kv_heads=2,
    head_dim=8,
    vocab=96,
    window=5,
    full_layers=1,
)
SPEC = Speculation(draft_vocab=64, steps=3, top_k=3, nodes=9, batch=2, context=7)


@pytest.fixture(params=["llama", "qwen3", "gemma3"])
def loop(request):
    torch.manual_seed(0)
    shape = SHAPE if request.param == "gemma3" else dataclasses.replace(SHAPE, window=None)
    return EagerLoop(shape, request.param, SPEC, torch.device("cpu"), torch.float32)


def _paths(parents: list[int]) -> list[list[int]]:
    """Nodes from the root to each node."""
    paths = []
    for node in range(len(parents)):
        path = [node]
        while path[0]:
            path.insert(0, parents[path[0]])
        paths.append(path)
    return paths


def _drafted(loop):
    with torch.inference_mode():
        return choose(loop.draft.grow(unmarked), loop.draft.root, SPEC.nodes)


def test_the_names_of_models_choose_their_layers():
    assert family_of("llama-3-8b") == "llama"
    assert family_of("Qwen3-8B") == "qwen3"
    assert family_of("gemma-3-4b") == "gemma3"


def test_the_norm_is_pytorchs():
    x, weight = torch.randn(5, 32), torch.randn(32)
    expected = torch.nn.functional.rms_norm(x, (32,), weight, 1e-6)
    torch.testing.assert_close(rms_norm(x, weight), expected)


def test_chosen_nodes_are_a_tree_behind_the_root(loop):
    tokens, parents, depths = _drafted(loop)
    assert tokens.shape == parents.shape == depths.shape == (2, SPEC.nodes)
    for row_parents, row_depths in zip(parents.tolist(), depths.tolist(), strict=True):
        assert row_parents[0] == row_depths[0] == 0
        for node in range(1, SPEC.nodes):
            assert 0 <= row_parents[node] < node
            assert row_depths[node] == row_depths[row_parents[node]] + 1


def test_the_best_nodes_are_chosen_and_equal_scores_go_by_place():
    candidates = SPEC.top_k + (SPEC.steps - 1) * SPEC.top_k**2
    scores = torch.full((2, candidates), -9.0)
    scores[:, :6] = torch.tensor([-1.0, -2.0, -2.0, -3.0, -4.0, -4.0])
    parents = torch.full((2, candidates), -1)
    parents[:, 3:] = 1
    tokens = torch.arange(candidates).expand(2, -1)
    tree = Tree(tokens, scores, parents, torch.ones_like(tokens))
    chosen, above, _ = choose(tree, torch.zeros(2, 1, dtype=torch.int64), SPEC.nodes)
    assert chosen[0].tolist() == [0, 0, 1, 2, 3, 4, 5, 6, 7]
    assert above[0].tolist() == [0, 0, 0, 0, 2, 2, 2, 2, 2]


def test_a_node_sees_its_ancestors_alone(loop):
    _, parents, _ = _drafted(loop)
    seen = ancestors(parents, SPEC.steps)
    for row, row_parents in enumerate(parents.tolist()):
        for node, path in enumerate(_paths(row_parents)):
            assert seen[row, node].nonzero().flatten().tolist() == path


def test_every_node_is_verified_as_the_end_of_its_own_path(loop):
    tokens, parents, depths = _drafted(loop)
    with torch.inference_mode():
        logits = loop.target.verify(tokens, depths, ancestors(parents, SPEC.steps), unmarked)
        deepest = int(depths[0].argmax())
        path = _paths(parents[0].tolist())[deepest]
        chain = tokens[:, :1].repeat(1, SPEC.nodes)
        chain[0, : len(path)] = tokens[0, path]
        places = torch.arange(SPEC.nodes).expand(2, -1)
        above = (places - 1).clamp_min(0)
        one_by_one = loop.target.verify(
            chain, places, torch.ones(2, SPEC.nodes, SPEC.nodes).tril().bool(), unmarked
        )
    assert above[0, 1] == 0
    torch.testing.assert_close(logits[0, path], one_by_one[0, : len(path)], rtol=1e-4, atol=1e-4)


def test_a_window_hides_the_context_beyond_it():
    seen = torch.eye(2, dtype=torch.bool).expand(2, 2, 2)
    mask = additive_mask(seen, 7, torch.float32, window=5)
    visible = (mask[0, 0] == 0).int().tolist()
    assert visible == [[0, 0, 1, 1, 1, 1, 1, 1, 0], [0, 0, 1, 1, 1, 1, 1, 0, 1]]


def test_acceptance_follows_the_targets_choices():
    parents = torch.tensor([[0, 0, 0, 1, 1, 4, 2, 2, 6]] * 2)
    tokens = torch.tensor([[0, 10, 11, 12, 13, 14, 15, 16, 17]] * 2)
    logits = torch.zeros(2, SPEC.nodes, SHAPE.vocab)
    for row, wanted in enumerate(({0: 10, 1: 13, 4: 14, 5: 33}, {0: 11, 2: 40})):
        for node, token in wanted.items():
            logits[row, node, token] = 1.0
    accepted, nodes = accept(tokens, parents, logits, SPEC.steps)
    assert accepted.tolist() == [[10, 13, 14, 33], [11, 40, -1, -1]]
    assert nodes.tolist() == [[0, 1, 4, 5], [0, 2, -1, -1]]


def test_accepted_entries_move_to_the_front_of_the_cache(loop):
    layer = loop.target.layers[0]
    before = layer.keys.clone()
    loop.target.compact(torch.tensor([[0, 2, 5, -1], [0, 1, 3, 8]]))
    for row, path in enumerate(([0, 2, 5], [0, 1, 3, 8])):
        for place, node in enumerate(path):
            expected = before[row, :, SPEC.context + node]
            assert torch.equal(layer.keys[row, :, SPEC.context + place], expected)


def test_too_small_a_tree_is_refused():
    spec = Speculation(draft_vocab=64, steps=1, top_k=3, nodes=9)
    with pytest.raises(ValueError, match="propose 3 nodes, fewer than the 8"):
        EagerLoop(SHAPE, "llama", spec, torch.device("cpu"), torch.float32)


def test_the_split_of_a_loop_names_every_part_and_adds_up(loop):
    timed = eager_run.time_cycles(loop, SPEC.draft_vocab, cycles=2, graphs=False)
    assert timed.captured is None
    (split,) = eager_run.split_cycles(loop, timed, None)
    assert {part for _, part in split.gpu_us} == set(PARTS)
    assert {part for _, part in split.host_us} == set(PARTS)
    assert {phase for phase, _ in split.gpu_us} == {"draft", "verify"}
    assert split.unattributed_us == 0
    assert split.adds_up
    assert split.vocab == SPEC.draft_vocab
    assert 0 < split.busy_us <= split.traced_cycle_us * 1.03


def test_nsys_sees_the_parts_as_nvtx_ranges(loop, monkeypatch):
    opened, seen = [], []

    def push(name):
        opened.append(name)
        seen.append(name)

    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.nvtx.range_push", push)
    monkeypatch.setattr("torch.cuda.nvtx.range_pop", lambda: opened.pop())
    with torch.inference_mode():
        loop.cycle(annotated)
    assert not opened
    assert set(seen) == {f"draft/{part}" for part in PARTS[:10]} | {
        f"verify/{part}" for part in PARTS if part not in ("fc", "softmax", "top-k", "tree")
    }


def test_a_wider_head_than_the_targets_can_be_timed(loop):
    loop.draft.head = loop.make_head(4 * SHAPE.vocab)
    assert loop.draft.head.vocab == 4 * SHAPE.vocab
    with torch.inference_mode():
        accepted = loop.cycle()
    assert all(-1 <= token < SHAPE.vocab for row in accepted for token in row)


def _events(*names):
    return [{"name": name} for name in names]


A, B, NOWHERE = ("draft", "fc"), ("draft", "MLP"), ("between", "unattributed")


def test_graph_kernels_take_the_parts_of_the_same_kernels_launched_alone():
    eager = _events(*"abcdabcd" * 5)
    keys = [A, A, B, B] * 10
    assert graph_labels(eager, keys, eager) == keys


def test_another_kernel_between_two_of_one_part_is_of_that_part():
    eager = _events(*"abcdef" * 5)
    keys = [A, A, A, B, B, B] * 5
    names = list("abcdef" * 5)
    names[7:8] = ["x", "y"]  # b
    names.insert(4, "z")  # between d and e
    labels = graph_labels(eager, keys, _events(*names))
    expected = [A, A, A, B, B, B, B, *[A] * 4, B, B, B, *keys[12:]]
    assert labels == expected


def test_a_graph_of_other_kernels_is_refused():
    with pytest.raises(CaptureError, match="of 8 kernels in the graph only 0"):
        graph_labels(_events(*"abcd" * 2), [A] * 8, _events(*"wxyz" * 2))


def test_kernels_belong_to_the_range_around_their_launch():
    name = "draft/fc"
    events = [
        {"cat": "user_annotation", "name": name, "ts": 10.0, "dur": 5.0, "tid": 1},
        {"cat": "cuda_runtime", "name": "l", "ts": 12.0, "tid": 1, "args": {"correlation": 1}},
        {"cat": "cuda_runtime", "name": "l", "ts": 16.0, "tid": 1, "args": {"correlation": 2}},
        {"cat": "cuda_runtime", "name": "l", "ts": 12.0, "tid": 2, "args": {"correlation": 3}},
        *(
            {"cat": "kernel", "name": "k", "ts": 20.0 + i, "dur": 1.0, "args": {"correlation": i}}
            for i in (1, 2, 3, 4)
        ),
    ]
    kernels, labels = eager_labels(events)
    assert [kernel["args"]["correlation"] for kernel in kernels] == [1, 2, 3, 4]
    assert labels == [A, NOWHERE, NOWHERE, NOWHERE]
