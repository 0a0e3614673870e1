"""Rows of accepted paths, moved in all caches at once: nothing lost, nothing else touched."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from frspec_kernels import cache_moves
from frspec_kernels.cache_moves import cache_rows, move_paths, move_paths_reference
from tests.kernels.attention_problem import DEVICE


def caches(slots, shapes, dtype=torch.float16):
    return [
        torch.randint(-(2**15), 2**15, (slots, *shape), device=DEVICE, dtype=torch.int16).view(
            dtype
        )
        for shape in shapes
    ]


def check(made, target, source):
    """Bits are compared: some of them are NaNs."""
    expected = [cache.clone() for cache in made]
    target, source = (torch.tensor(x, device=DEVICE, dtype=torch.int64) for x in (target, source))
    move_paths_reference(expected, target, source)
    move_paths(cache_rows(made), target, source)
    for cache, wanted in zip(made, expected, strict=True):
        assert torch.equal(cache.view(torch.int16), wanted.view(torch.int16))


def test_a_target_may_be_the_source_of_an_earlier_move():
    # Accepted nodes 0, 3, 5, 7 of the tree in slots 10 to 17; 13 is read and written.
    check(caches(20, [(2, 8)]), [[10, 11, 12, 13]], [[10, 13, 15, 17]])


def test_a_chain_of_overlaps_in_one_path():
    check(caches(40, [(2, 8)]), [list(range(1, 8))], [list(range(2, 9))])


def test_padding_requests_move_slot_zero_onto_itself():
    made = caches(30, [(1, 16)])
    check(made, [[20, 21, 22], [0, 0, 0], [0, 0, 0]], [[20, 24, 27], [0, 0, 0], [0, 0, 0]])


@pytest.mark.parametrize("places", [1, 4, 7, 9, 40])
def test_rows_of_several_widths(places):
    """Rows of one word, of a block and a bit, and of several blocks, in one launch."""
    slots = 2 * 64
    target = [[64 * b + i for i in range(places)] for b in range(2)]
    source = [[64 * b + min(63, i + i // 2) for i in range(places)] for b in range(2)]
    check(caches(slots, [(1, 4), (3, 344), (8, 128), (2, 1030)]), target, source)


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 5), st.integers(1, 6), st.integers(2, 12), st.randoms())
def test_random_paths(requests, places, nodes, draw):
    places = min(places, nodes)
    made = caches(requests * nodes, [(2, 12), (1, 4)])
    target, source = [], []
    order = list(range(requests))
    draw.shuffle(order)
    for request in order:
        first = request * nodes
        path = [0, *sorted(draw.sample(range(1, nodes), places - 1))]
        accepted = draw.randint(1, places)
        target.append([first + i for i in range(places)])
        source.append([first + (path[i] if i < accepted else i) for i in range(places)])
    check(made, target, source)


def test_nothing_to_move():
    made = caches(4, [(1, 4)])
    before = made[0].clone()
    none = torch.zeros(0, 3, device=DEVICE, dtype=torch.int64)
    move_paths(cache_rows(made), none, none)
    assert torch.equal(made[0].view(torch.int16), before.view(torch.int16))


def test_caches_that_cannot_be_moved_are_refused():
    with pytest.raises(ValueError, match="no caches"):
        cache_rows([])
    with pytest.raises(ValueError, match="contiguous, got"):
        cache_rows([torch.zeros(8, 2, 4, device=DEVICE).transpose(1, 2)])
    with pytest.raises(ValueError, match="rows of 6 bytes"):
        cache_rows([torch.zeros(8, 3, device=DEVICE, dtype=torch.float16)])


def test_tensors_that_do_not_fit_are_refused():
    rows = cache_rows(caches(8, [(1, 4)]))
    good = torch.zeros(2, 3, device=DEVICE, dtype=torch.int64)
    with pytest.raises(TypeError, match="source is int64"):
        move_paths(rows, good, good.int())
    with pytest.raises(ValueError, match="source is a contiguous"):
        move_paths(rows, good, good[:, :2])
    with pytest.raises(ValueError, match="target is a contiguous"):
        move_paths(rows, good.T, good.T)


def test_shipped_tiles_fit_the_registers():
    for places in range(1, 100):
        padded, block = cache_moves._tile(places)
        assert padded >= places
        assert padded * block <= max(cache_moves.TILE_WORDS, 32 * padded)
