# ruff: noqa: TID251 (these run where SGLang is)
"""Accepted paths are moved in SGLang's cache, by our kernel or by SGLang's own function."""

from typing import Any

import pytest
import torch
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

from frspec_kernels.tree import Accepted
from frspec_kernels.tree_reference import accept_greedy_reference
from sgl_frspec.path_moves import path_mover

SLOTS = 40


class OtherPool(MHATokenToKVPool):
    """A layout of its own."""


def pool(kind: type = MHATokenToKVPool, **changes: Any) -> Any:
    made: Any = object.__new__(kind)
    made.size, made.page_size, made.layer_num = SLOTS - 4, 4, 3
    made.k_buffer = [torch.randn(SLOTS, 2, 8) for _ in range(3)]
    made.v_buffer = [torch.randn(SLOTS, 2, 6) for _ in range(3)]
    for name, value in changes.items():
        setattr(made, name, value)
    made.moved = []
    made.move_kv_cache = lambda target, source: made.moved.append((target, source))
    return made


def accepted() -> Accepted:
    """Nodes 0, 1, 3 and 5 of six in slots 10 to 15; of the next tree its root alone."""
    tokens = torch.tensor([[9, 1, 2, 3, 4, 5]] * 2)
    parents = torch.tensor([[-1, 0, 0, 1, 1, 3]] * 2, dtype=torch.int32)
    target = torch.tensor([[1, 3, 0, 5, 0, 77], [40, 0, 0, 0, 0, 0]])
    slots = torch.arange(10, 22)
    return accept_greedy_reference(tokens, parents, target, torch.tensor([3, 8]), 4, slots)


def test_the_path_comes_to_the_front_in_every_layer():
    made, found = pool(), accepted()
    before = [buffer.clone() for buffer in (*made.k_buffer, *made.v_buffer)]
    path_mover(made)(found)
    assert made.moved == []
    for buffer, old in zip((*made.k_buffer, *made.v_buffer), before, strict=True):
        assert torch.equal(buffer[10:14], old[[10, 11, 13, 15]])
        untouched = [slot for slot in range(SLOTS) if slot not in range(10, 14)]
        assert torch.equal(buffer[untouched], old[untouched])


@pytest.mark.parametrize(
    "made",
    [
        pool(OtherPool),
        pool(k_scale_buffer=[torch.zeros(SLOTS, 1)]),
        pool(k_buffer=[torch.randn(SLOTS // 4, 2, 4, 8) for _ in range(3)]),
        pool(v_buffer=[torch.zeros(SLOTS, 3, dtype=torch.float16) for _ in range(3)]),
        pool(layer_num=0, k_buffer=[], v_buffer=[]),
    ],
    ids=["another class", "scales", "pages", "rows of 6 bytes", "no layers"],
)
def test_other_layouts_are_moved_by_sglang(made):
    before, found = [buffer.clone() for buffer in made.k_buffer], accepted()
    path_mover(made)(found)
    [(target, source)] = made.moved
    assert found.target_slots is not None
    assert found.source_slots is not None
    assert target.tolist() == found.target_slots.flatten().tolist()
    assert source.tolist() == found.source_slots.flatten().tolist()
    assert all(map(torch.equal, made.k_buffer, before))


def test_an_acceptance_without_slots_is_told():
    with pytest.raises(RuntimeError, match="was not given the cache's slots"):
        path_mover(pool())(accepted()._replace(target_slots=None))
