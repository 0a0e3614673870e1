"""Snapshots of contexts and packed masks, against PyTorch; what must not be touched is not."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from frspec_kernels.context_snapshot import (
    BLOCK_SLOTS,
    MAX_PROGRAMS,
    pack_byte_mask,
    snapshot_contexts,
    snapshot_reference,
)
from frspec_kernels.draft_attention import pack_mask
from tests.kernels.attention_problem import CUDA, DEVICE

WIDTH = (MAX_PROGRAMS + 2) * BLOCK_SLOTS + 5  # a program has more than one turn
POISON = -7


def check_snapshot(lengths, *, width=WIDTH, tail=0, index=torch.int64, table_type=torch.int32):
    table = torch.randint(0, 1 << 30, (len(lengths) + 3, width)).to(DEVICE, table_type)
    rows = torch.randperm(len(lengths) + 3)[: len(lengths)].to(DEVICE, index)
    seq_lens = torch.tensor(lengths, device=DEVICE, dtype=index)
    slots = torch.full((len(lengths) + 1, width + 3), POISON, device=DEVICE, dtype=torch.int32)
    taken = torch.full((len(lengths) + 1,), POISON, device=DEVICE, dtype=torch.int32)
    snapshot_contexts(table, rows, seq_lens, slots, taken, tail=tail)
    expected = torch.full_like(slots, POISON)
    for row, context in zip(
        expected, snapshot_reference(table, rows, seq_lens, tail), strict=False
    ):
        row[: context.numel()] = context
    assert taken.tolist() == [max(n - tail, 0) for n in lengths] + [POISON]
    assert torch.equal(slots, expected)


@pytest.mark.parametrize("lengths", [[1], [0, 5], [WIDTH, 1, BLOCK_SLOTS], [BLOCK_SLOTS + 1]])
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_rows_are_copied_as_far_as_the_context_goes(lengths, index):
    check_snapshot(lengths, index=index)


def test_the_tail_is_left_out_and_never_counts_below_zero():
    check_snapshot([40, 3, 16, 0], width=64, tail=16)


def test_a_table_of_int64():
    check_snapshot([7, 30], width=31, table_type=torch.int64)


def test_no_requests():
    check_snapshot([], width=8)


@given(
    st.integers(1, 70 if CUDA else 40),
    st.integers(1, 3),
    st.floats(0, 1),
    st.sampled_from([torch.bool, torch.uint8]),
)
@settings(max_examples=40, deadline=None)
def test_packing_equals_the_reference(nodes, batch, density, dtype):
    mask = (torch.rand(batch, nodes, nodes) < density).to(DEVICE, dtype)
    words = torch.full((batch * nodes + 2, -(-nodes // 32)), POISON, device=DEVICE).int()
    pack_byte_mask(mask.flatten(), nodes, words)
    assert torch.equal(words[:-2], pack_mask(mask.bool().view(batch * nodes, nodes)))
    assert (words[-2:] == POISON).all()


def test_every_bit_of_a_word_and_bytes_other_than_one():
    mask = torch.full((1, 64, 64), 255, dtype=torch.uint8, device=DEVICE)
    words = torch.zeros(64, 2, dtype=torch.int32, device=DEVICE)
    pack_byte_mask(mask, 64, words)
    assert (words == -1).all()


def matrix(*shape, dtype=torch.int32):
    return torch.zeros(*shape, dtype=dtype, device=DEVICE)


WRONG: dict[str, dict[str, Any]] = {
    "rows is int32 or int64": {"rows": matrix(2, dtype=torch.float32)},
    "slots and lengths are int32": {"slots": matrix(2, 8, dtype=torch.int64)},
    "contiguous rows": {"table": matrix(8, 4).T},
    "2 rows, but 3 seq_lens": {"seq_lens": matrix(3)},
    "1 rows of slots": {"slots": matrix(1, 8)},
    "slots is 7 wide, the table 8": {"slots": matrix(2, 7)},
}


@pytest.mark.parametrize("message", WRONG)
def test_wrong_arguments_are_named(message):
    good: dict[str, Any] = {
        "table": matrix(4, 8),
        "rows": matrix(2),
        "seq_lens": matrix(2),
        "slots": matrix(2, 8),
        "lengths": matrix(2),
    }
    error = TypeError if "int32" in message else ValueError
    with pytest.raises(error, match=message):
        snapshot_contexts(**(good | WRONG[message]))


@pytest.mark.parametrize(
    ("mask", "words", "error", "message"),
    [
        (matrix(9), matrix(3, 1), TypeError, "bool or uint8 to int32 words"),
        (matrix(8, dtype=torch.bool), matrix(3, 1), ValueError, r"not \[B, 3, 3\]"),
        (matrix(9, dtype=torch.bool), matrix(3, 2), ValueError, r"at least \[3, 1\]"),
        (matrix(9, dtype=torch.bool), matrix(1, 3).T, ValueError, "contiguous"),
    ],
)
def test_wrong_masks_are_named(mask, words, error, message):
    if message == "contiguous":
        words = matrix(3, 2)[:, :1]
    with pytest.raises(error, match=message):
        pack_byte_mask(mask, 3, words)
