"""Slot bookkeeping and KV moves against loops over single elements."""

import random

import pytest
import torch

GARBAGE = -9
POOL_ROWS, CONTEXT = 7, 64


@pytest.fixture(params=[torch.int32, torch.int64], ids=["int32", "int64"])
def pool(request):
    draw = torch.randperm(POOL_ROWS * CONTEXT) + 1
    return draw.view(POOL_ROWS, CONTEXT).to(request.param)


def ranges(seed: int):
    draw = random.Random(seed)
    rows = draw.sample(range(POOL_ROWS), 4)
    starts = [draw.randrange(CONTEXT // 2) for _ in rows]
    ends = [start + draw.choice([0, 1, 2, 9, 17]) for start in starts]
    return rows, starts, ends


@pytest.mark.parametrize("seed", range(4))
def test_draft_slots(slots, pool, seed):
    rows, lengths, _ = ranges(seed)
    top_k, columns = 3, 4
    out = torch.full((len(rows) * top_k * columns,), GARBAGE)
    slots.assign_draft_cache_locs_contiguous_cpu(
        torch.tensor(rows), pool, torch.tensor(lengths).int(), out, CONTEXT, top_k, columns
    )
    expected = [
        int(pool[row, length + i])
        for row, length in zip(rows, lengths, strict=True)
        for i in range(top_k * columns)
    ]
    assert out.tolist() == expected


@pytest.mark.parametrize("seed", range(4))
def test_gather_and_scatter_of_ragged_ranges(slots, pool, seed):
    rows, starts, ends = ranges(seed)
    cells = [
        (row, column)
        for row, start, end in zip(rows, starts, ends, strict=True)
        for column in range(start, end)
    ]
    arguments = (torch.tensor(rows).int(), pool, torch.tensor(starts), torch.tensor(ends).int())
    gathered = torch.full((len(cells) + 3,), GARBAGE)
    slots.assign_extend_cache_locs_cpu(*arguments, gathered, CONTEXT)
    assert gathered.tolist() == [int(pool[cell]) for cell in cells] + [GARBAGE] * 3

    before, new = pool.clone(), torch.arange(1000, 1000 + len(cells))
    slots.assign_req_to_token_pool_cpu(*arguments, new, CONTEXT)
    for cell, value in zip(cells, new.tolist(), strict=True):
        before[cell] = value
    assert torch.equal(pool, before)


def test_bonus_tokens(slots):
    accepted = torch.arange(100, 115)
    bonus = torch.full((3,), GARBAGE, dtype=torch.int32)
    slots.fill_bonus_tokens_cpu(accepted, torch.tensor([1, 5, 3]).int(), bonus, 5)
    assert bonus.tolist() == [100, 109, 112]


def test_accepted_slots_are_packed_in_order(slots):
    index = torch.tensor([[0, 2, -1], [5, -1, -1], [7, 8, 9]], dtype=torch.int32)
    cache = torch.arange(50, 60)
    out = torch.full((9,), GARBAGE)
    slots.fill_accept_out_cache_loc_cpu(index, cache, out)
    assert out.tolist() == [50, 52, 55, 57, 58, 59] + [GARBAGE] * 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kv_slots_move_in_every_buffer(kv_copy, dtype):
    buffers = [torch.randn(20, heads, 8).to(dtype) for heads in (2, 2, 3)]
    originals = [buffer.clone() for buffer in buffers]
    target, source = torch.tensor([3, 4, 5, 9]), torch.tensor([4, 5, 17, 3])  # chained moves
    kv_copy.copy_all_layer_kv_cache_cpu(
        torch.tensor([buffer.data_ptr() for buffer in buffers], dtype=torch.uint64),
        torch.tensor([buffer[0].nbytes for buffer in buffers]),
        target,
        source,
    )
    for buffer, original in zip(buffers, originals, strict=True):
        expected = original.clone()
        for to, come_from in zip(target.tolist(), source.tolist(), strict=True):
            expected[to] = original[come_from]
        assert torch.equal(buffer, expected)


def test_moving_nothing(kv_copy):
    buffer = torch.randn(4, 2)
    before = buffer.clone()
    none = torch.zeros(0, dtype=torch.int64)
    kv_copy.copy_all_layer_kv_cache_cpu(
        torch.tensor([buffer.data_ptr()], dtype=torch.uint64), torch.tensor([8]), none, none
    )
    assert torch.equal(buffer, before)
