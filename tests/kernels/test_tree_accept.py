# pyright: reportArgumentType=false
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from frspec_kernels import tree
from frspec_kernels.tree import TreeShape
from frspec_kernels.tree_reference import accept_greedy_reference
from tests.kernels.test_tree import DEVICE, LARGE, SMALL, assert_same, shapes
from tests.kernels.tree_oracle import built, longest_agreeing_path, poison, target_for

TYPES = (torch.float32, torch.bfloat16, torch.float16)


def accept(shape, out, target, lens, **options):
    batch = out.tokens.shape[0]
    memory = poison(
        tree.empty_accepted(
            batch, shape.nodes, shape.steps + 1, out.tokens.device, slots="slots" in options
        )
    )
    return tree.accept_greedy(
        out.tokens, out.parents, target, lens, shape.steps + 1, out=memory, **options
    )


@pytest.mark.parametrize("agreement", [0.0, 0.6, 1.0])
@pytest.mark.parametrize("shape", [*SMALL, *(LARGE if DEVICE == "cuda" else LARGE[-1:])], ids=repr)
def test_acceptance_equals_the_reference(shape, agreement):
    batch = 3
    *_, out, (_, lens) = built(shape, batch, 8, device=DEVICE)
    target = target_for(out, 1, agreement)
    slots = torch.randperm(5000)[: batch * shape.nodes].to(DEVICE)
    got = accept(shape, out, target, lens, slots=slots)
    max_path = shape.steps + 1
    expected = accept_greedy_reference(out.tokens, out.parents, target, lens, max_path, slots)
    assert_same(got, expected)
    for integer in (torch.int32, torch.int64):
        again = accept(shape, out, target, lens.to(integer), slots=slots.to(integer))
        assert_same(again, expected)


@settings(max_examples=15, deadline=None)
@given(shape=shapes(), seed=st.integers(0, 2**30), agreement=st.floats(0.3, 1.0))
def test_the_accepted_path_is_the_longest_agreeing_root_path(shape, seed, agreement):
    *_, out, (_, lens) = built(shape, 2, seed, levels=seed % 4, device=DEVICE)
    target = target_for(out, seed, agreement)
    slots = torch.arange(100, 100 + 2 * shape.nodes, device=DEVICE)
    got = accept(shape, out, target, lens, slots=slots)
    assert_paths(shape, out, target, lens, got, slots)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [*SMALL, *LARGE], ids=repr)
def test_thousands_of_paths(shape):
    batch = 200
    *_, out, (_, lens) = built(shape, batch, 4, levels=5, device="cuda")
    target = target_for(out, 2, 0.8)
    slots = torch.randperm(batch * shape.nodes, device="cuda")
    assert_paths(shape, out, target, lens, accept(shape, out, target, lens, slots=slots), slots)


def assert_paths(shape, out, target, lens, got, slots):
    n, width = shape.nodes, shape.steps + 1
    out, got = (type(x)(*(t.cpu() for t in x)) for x in (out, got))
    for b in range(out.tokens.shape[0]):
        tokens, parents, said = (x[b].tolist() for x in (out.tokens, out.parents, target))
        path = longest_agreeing_path(tokens, parents, said)
        assert all(parents[child] == parent for parent, child in pairwise(path))
        assert path == stock_walk(out, b, said)
        padding = width - len(path)
        assert got.accept_index[b].tolist() == [b * n + i for i in path] + [-1] * padding
        assert int(got.accept_lens[b]) == len(path)
        assert got.path_tokens[b].tolist() == [said[i] for i in path] + [0] * padding
        assert int(got.bonus_tokens[b]) == said[path[-1]]
        assert int(got.new_seq_lens[b]) == int(lens[b]) + len(path)
        predicts = got.predicts[b * n : (b + 1) * n].tolist()
        assert predicts == [said[i] if i in path else 0 for i in range(n)]
        mine = slots[b * n : (b + 1) * n].tolist()
        front = [mine[min(i, n - 1)] for i in range(width)]
        assert got.target_slots[b].tolist() == front
        assert got.source_slots[b].tolist() == [mine[i] for i in path] + front[len(path) :]


def stock_walk(out, b, said):
    """The path that a walk along the links takes, as SGLang's verification walks it."""
    tokens, first, sibling = (x[b].tolist() for x in (out.tokens, out.next_token, out.next_sibling))
    path = [0]
    at = first[0]
    while at != -1:
        if tokens[at] == said[path[-1]]:
            path.append(at)
            at = first[at]
        else:
            at = sibling[at]
    return path


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("vocab", [1, 37, 4096, 9001])
def test_logits_give_their_argmax(dtype, vocab):
    shape = TreeShape(2, 2, 4)
    *_, out, (_, lens) = built(shape, 2, 3, device=DEVICE)
    logits = torch.randn(8, vocab + 3, device=DEVICE).to(dtype)[:, :vocab]
    for node in range(4):  # let the target agree with some drafts
        child = out.next_token[0, node]
        if child > 0 and out.tokens[0, child] < vocab:
            logits[node, out.tokens[0, child]] = 50.0
    got = accept(shape, out, logits, lens)
    target = logits.float().argmax(-1).view(2, 4)
    assert_same(got, accept_greedy_reference(out.tokens, out.parents, target, lens, 3))
    keys = poison([tree.empty_argmax_keys(8, vocab, DEVICE)])[0]
    assert_same(accept(shape, out, logits, lens, argmax_keys=keys), got)


def test_every_block_of_a_long_vocabulary_is_read():
    """Past 131,072 logits a program reads more than one block of them."""
    vocab = 144_016
    bests = [0, 4095, 4096, 8191, 8192, 139_264, 143_360, vocab - 1]
    logits = torch.full((len(bests), vocab), -3.0, device=DEVICE)
    logits[range(len(bests)), bests] = 2.0
    logits[1, 4096] = 2.0  # equal, in the next block of the same program
    nodes = torch.zeros(1, len(bests), dtype=torch.int64, device=DEVICE)
    parents = torch.arange(-1, len(bests) - 1, dtype=torch.int32, device=DEVICE)[None]
    nodes[0, 1:] = torch.tensor(bests[:-1], device=DEVICE)
    lens = torch.tensor([10], device=DEVICE)
    got = tree.accept_greedy(nodes, parents, logits, lens, len(bests))
    assert got.path_tokens.tolist() == [bests]


def test_equal_logits_give_the_smallest_id_and_nan_wins():
    inf, nan = float("inf"), float("nan")
    logits = torch.full((4, 9001), -3.0, device=DEVICE)
    logits[0, [8999, 4097, 5000]] = 2.0
    logits[1] = -inf
    logits[2, 7], logits[2, 8500] = inf, nan
    logits[3, [0, 1]] = torch.tensor([-0.0, 0.0], device=DEVICE)
    tokens = torch.tensor([[5, 4097, 0, 8500]], device=DEVICE)
    parents = torch.tensor([[-1, 0, 1, 2]], dtype=torch.int32, device=DEVICE)
    lens = torch.tensor([10], device=DEVICE)
    got = tree.accept_greedy(tokens, parents, logits, lens, 4)
    assert got.path_tokens.tolist() == [[4097, 0, 8500, 0]]
    assert got.new_seq_lens.tolist() == [14]


def test_paths_stop_at_max_path():
    tokens = torch.tensor([[1, 2, 3, 4]], device=DEVICE)
    parents = torch.tensor([[-1, 0, 0, 0]], dtype=torch.int32, device=DEVICE)
    lens = torch.tensor([10], device=DEVICE)
    target = torch.tensor([[3, 9, 8, 7]], device=DEVICE)
    got = tree.accept_greedy(tokens, parents, target, lens, 2)
    assert got.accept_index.tolist() == [[0, 2]]
    assert got.path_tokens.tolist() == [[3, 8]]


@pytest.mark.parametrize("max_path", [1, 2, 3, 4, 5, 9])
def test_a_path_longer_than_max_path_ends_after_its_first_nodes(max_path):
    tokens = torch.tensor([[1, 2, 3, 4, 5], [1, 7, 2, 3, 4]], device=DEVICE)
    parents = torch.tensor([[-1, 0, 1, 2, 3], [-1, 0, 0, 2, 3]], dtype=torch.int32, device=DEVICE)
    target = torch.tensor([[2, 3, 4, 5, 6], [2, 9, 3, 8, 9]], device=DEVICE)
    lens = torch.tensor([10, 20], device=DEVICE)
    slots = torch.arange(100, 110, device=DEVICE)
    memory = poison(tree.empty_accepted(2, 5, max_path, DEVICE, slots=True))
    got = tree.accept_greedy(tokens, parents, target, lens, max_path, slots=slots, out=memory)
    paths = [[0, 1, 2, 3, 4][:max_path], [5, 7, 8][:max_path]]
    said = [[target.flatten()[node].item() for node in path] for path in paths]
    rest = [max_path - len(path) for path in paths]
    assert got.accept_index.tolist() == [p + [-1] * r for p, r in zip(paths, rest, strict=True)]
    assert got.path_tokens.tolist() == [p + [0] * r for p, r in zip(said, rest, strict=True)]
    assert got.accept_lens.tolist() == [len(path) for path in paths]
    assert got.bonus_tokens.tolist() == [path[-1] for path in said]
    assert got.new_seq_lens.tolist() == [10 + len(paths[0]), 20 + len(paths[1])]
    on_path = {node for path in paths for node in path}
    assert got.predicts.tolist() == [
        token if node in on_path else 0 for node, token in enumerate(target.flatten().tolist())
    ]
    assert got.source_slots is not None
    assert got.target_slots is not None
    front = torch.arange(max_path).clamp(max=4)
    for request, path in enumerate(paths):
        home = [100 + 5 * request + place for place in front.tolist()]
        assert got.target_slots[request].tolist() == home
        moved = [100 + node for node in path]
        assert got.source_slots[request].tolist() == moved + home[len(path) :]
    assert_same(got, accept_greedy_reference(tokens, parents, target, lens, max_path, slots))


def test_nothing_for_no_requests():
    tokens = torch.empty(0, 4, dtype=torch.int64, device=DEVICE)
    parents = torch.empty(0, 4, dtype=torch.int32, device=DEVICE)
    lens = torch.empty(0, dtype=torch.int64, device=DEVICE)
    logits = torch.empty(0, 50, device=DEVICE)
    got = tree.accept_greedy(tokens, parents, logits, lens, 3)
    assert got.accept_index.shape == (0, 3)


def test_misfits_are_refused():
    tokens = torch.zeros(2, 3, dtype=torch.int64, device=DEVICE)
    parents = torch.zeros(2, 3, dtype=torch.int32, device=DEVICE)
    lens = torch.ones(2, dtype=torch.int64, device=DEVICE)
    with pytest.raises(ValueError, match=r"logits are \[6, V\]"):
        tree.accept_greedy(tokens, parents, torch.zeros(5, 9, device=DEVICE), lens, 2)
    for other in (torch.float64, torch.float8_e4m3fn):
        logits = torch.zeros(6, 9, device=DEVICE).to(other)
        with pytest.raises(TypeError, match=r"float32, bf16 or fp16, got torch\.float"):
            tree.accept_greedy(tokens, parents, logits, lens, 2)
    with pytest.raises(ValueError, match="target is on meta"):
        tree.accept_greedy(tokens, parents, torch.zeros(6, 9, device="meta"), lens, 2)
    with pytest.raises(ValueError, match=r"N in \[1, 1024\], got \[2, 0\]"):
        tree.accept_greedy(tokens[:, :0], parents[:, :0], tokens[:, :0], lens, 2)
    with pytest.raises(ValueError, match=r"N in \[1, 1024\], got \[6\]"):
        tree.accept_greedy(tokens.flatten(), parents, tokens, lens, 2)
    many = torch.zeros(1, 1025, dtype=torch.int64, device=DEVICE)
    with pytest.raises(ValueError, match=r"N in \[1, 1024\], got \[1, 1025\]"):
        tree.accept_greedy(many, many.int(), many, lens[:1], 2)
    with pytest.raises(TypeError, match=r"target is torch\.int64"):
        tree.accept_greedy(tokens, parents, parents, lens, 2)
    with pytest.raises(TypeError, match=r"parents is torch\.int32"):
        tree.accept_greedy(tokens, tokens, tokens, lens, 2)
    for length in (0, -1, 1025):
        with pytest.raises(ValueError, match=rf"max_path is in \[1, 1024\], got {length}"):
            tree.accept_greedy(tokens, parents, tokens, lens, length)
    with pytest.raises(TypeError, match="max_path is an int, got Tensor"):
        tree.accept_greedy(tokens, parents, tokens, lens, torch.tensor(2))
    with pytest.raises(ValueError, match=r"of 1 to 1048576 tokens, got 0"):
        tree.accept_greedy(tokens, parents, torch.zeros(6, 0, device=DEVICE), lens, 2)
    meta = [x.to("meta") for x in (tokens, parents, torch.empty(6, 2**20 + 1, device="meta"), lens)]
    with pytest.raises(ValueError, match="of 1 to 1048576 tokens, got 1048577"):
        tree.accept_greedy(*meta, max_path=2)
    with pytest.raises(ValueError, match=r"seq_lens is contiguous \[2\].*strides \[2\]"):
        tree.accept_greedy(tokens, parents, tokens, lens.repeat(2)[::2], 2)
    out = tree.empty_accepted(2, 3, 2, DEVICE)._replace(accept_lens=lens)
    with pytest.raises(TypeError, match=r"out\.accept_lens is torch\.int32, got torch\.int64"):
        tree.accept_greedy(tokens, parents, tokens, lens, 2, out=out)
    with pytest.raises(ValueError, match=r"out\.accept_index is contiguous \[2, 2\]"):
        tree.accept_greedy(
            tokens, parents, tokens, lens, 2, out=tree.empty_accepted(2, 3, 3, DEVICE)
        )
    with pytest.raises(ValueError, match=r"slots is contiguous \[6\]"):
        tree.accept_greedy(tokens, parents, tokens, lens, 2, slots=lens)
    out = tree.empty_accepted(2, 3, 2, DEVICE)
    slots = torch.zeros(6, dtype=torch.int64, device=DEVICE)
    with pytest.raises(ValueError, match="no source_slots"):
        tree.accept_greedy(tokens, parents, tokens, lens, 2, slots=slots, out=out)
