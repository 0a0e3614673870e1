# pyright: reportArgumentType=false
"""Draft decoding: every branch must see what it would see alone."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.checks import no_worse_than_torch
from frspec_kernels.draft_attention import draft_branches, pack_mask
from frspec_kernels.tree_attention import tree_attention
from tests.kernels.attention_problem import CUDA, DEVICE, SMALL, Problem, to_device

CONFIG = None if CUDA else SMALL


def inputs(contexts, branches, steps, **sizes):
    """Queries, context and slots of a batch whose branches have slots of their own."""
    own = [[-1] * (branches * steps)] * len(contexts)
    problem = Problem(contexts, own, in_cache=True, **sizes)
    q = problem.q[: len(contexts) * branches].to(DEVICE)
    context, tree = to_device(problem.context), to_device(problem.tree)
    assert tree.slots is not None
    return q, context, tree.slots.view(len(contexts), branches, steps)


def poisoned_after(context, own, step):
    """The cache as it is at ``step``: slots of later steps hold what was there before."""
    k, v = context.k_cache.clone(), context.v_cache.clone()
    k[own[..., step + 1 :]] = float("nan")
    v[own[..., step + 1 :]] = float("nan")
    return replace(context, k_cache=k, v_cache=v)


def branch_by_branch(q, context, lists):
    """Every query alone, on its own list of slots: PyTorch in the type of q, and in fp64."""
    results: dict = {q.dtype: [], torch.float64: []}
    group = q.shape[1] // context.k_cache.shape[1]
    for row, slots in enumerate(lists):
        for dtype, rows in results.items():
            k = context.k_cache[slots].to(dtype).repeat_interleave(group, 1)
            v = context.v_cache[slots].to(dtype).repeat_interleave(group, 1)
            scores = torch.einsum("hd,nhd->hn", q[row].to(dtype), k) * q.shape[-1] ** -0.5
            probs = torch.softmax(scores.to(torch.promote_types(dtype, torch.float32)), 1)
            rows.append(torch.einsum("hn,nhd->hd", probs.to(dtype), v))
    return torch.stack(results[q.dtype]), torch.stack(results[torch.float64])


def context_slots(context, b):
    start, end = context.indptr[b : b + 2].tolist()
    return context.indices[start:end]


def check_every_step(contexts, branches, steps, **sizes):
    q, context, own = inputs(contexts, branches, steps, **sizes)
    fixed = draft_branches(len(contexts), branches, steps, DEVICE)
    for step in range(steps):
        now = poisoned_after(context, own, step)
        out = torch.full_like(q, float("nan"))
        tree_attention(q, now, fixed.tree(own.flatten(), step), out=out, config=CONFIG)
        lists = [
            torch.cat([context_slots(context, b), own[b, j, : step + 1]])
            for b in range(len(contexts))
            for j in range(branches)
        ]
        verdict = no_worse_than_torch(out, *branch_by_branch(q, now, lists), f"step {step}")
        assert verdict.ok, verdict.why


@pytest.mark.parametrize(("branches", "steps"), [(1, 1), (3, 4), (5, 8), (9, 2)])
def test_every_branch_equals_itself_alone_while_later_slots_hold_nan(branches, steps):
    check_every_step([37, 0, 5], branches, steps)


def test_window_counts_positions_from_the_branch_s_own_step():
    q, context, own = inputs([37, 2], 3, 4)
    fixed, window, step = draft_branches(2, 3, 4, DEVICE), 2, 3
    out = tree_attention(
        q, context, fixed.tree(own.flatten(), step), window_left=window, config=CONFIG
    )
    # At step 3 a window of 2 reaches back to the branch's own step 1: no context at all.
    lists = [own[b, j, 1 : step + 1] for b in range(2) for j in range(3)]
    verdict = no_worse_than_torch(out, *branch_by_branch(q, context, lists))
    assert verdict.ok, verdict.why


def test_a_mask_may_send_a_branch_through_other_branches_slots():
    q, context, own = inputs([21], 4, 2)
    fixed = draft_branches(1, 4, 2, DEVICE)
    parents = [2, 0, 0, 3]  # the branch whose slot of step 0 is the ancestor
    visible = torch.zeros(4, 8, dtype=torch.bool)
    for branch, parent in enumerate(parents):
        visible[branch, branch * 2 + 1] = visible[branch, parent * 2] = True
    tree = fixed.tree(own.flatten(), 1, pack_mask(visible).to(DEVICE))
    out = tree_attention(q, context, tree, config=CONFIG)
    lists = [
        torch.cat([context_slots(context, 0), own[0, parent, :1], own[0, branch, 1:]])
        for branch, parent in enumerate(parents)
    ]
    verdict = no_worse_than_torch(out, *branch_by_branch(q, context, lists))
    assert verdict.ok, verdict.why


@given(rows=st.lists(st.lists(st.booleans(), min_size=70, max_size=70), min_size=1, max_size=4))
@settings(max_examples=50, deadline=None)
def test_mask_words_hold_key_j_in_bit_j_mod_32_of_word_j_div_32(rows):
    words = pack_mask(torch.tensor(rows))
    assert words.dtype == torch.int32
    assert words.shape == (len(rows), 3)
    for row, packed in zip(rows, words.tolist(), strict=True):
        bits = sum((word & 0xFFFFFFFF) << (32 * i) for i, word in enumerate(packed))
        assert bits == sum(bit << j for j, bit in enumerate(row))


@pytest.mark.parametrize(("batch", "branches", "steps"), [(1, 1, 1), (2, 3, 4), (3, 10, 7)])
def test_masks_and_depths_of_every_step(batch, branches, steps):
    fixed = draft_branches(batch, branches, steps, "cpu")
    for step in range(steps):
        tree = fixed.tree(torch.arange(batch * branches * steps), step)
        for node, packed in enumerate(tree.mask.tolist()):
            bits = sum((word & 0xFFFFFFFF) << (32 * i) for i, word in enumerate(packed))
            first = node % branches * steps
            assert bits == sum(1 << key for key in range(first, first + step + 1))
        assert tree.depths is not None
        assert tree.depths.tolist() == [step] * (batch * branches)
    assert fixed.key_depths.tolist() == list(range(steps)) * (batch * branches)
    assert fixed.qo_indptr.tolist() == [branches * b for b in range(batch + 1)]
    assert fixed.key_indptr.tolist() == [branches * steps * b for b in range(batch + 1)]


def test_refuses_sizes_that_it_was_not_made_for():
    fixed = draft_branches(1, 2, 3, "cpu")
    with pytest.raises(ValueError, match=r"step is in \[0, 3\), got 3"):
        fixed.tree(torch.arange(6), 3)
    with pytest.raises(ValueError, match=r"step is in \[0, 3\), got -1"):
        fixed.tree(torch.arange(6), -1)
    with pytest.raises(ValueError, match="slots has 5 entries"):
        fixed.tree(torch.arange(5), 0)
    with pytest.raises(TypeError, match="step is an int, got Tensor"):
        fixed.tree(torch.arange(6), torch.tensor(1))
    with pytest.raises(ValueError, match="at least 1, got 1, 0, 3"):
        draft_branches(1, 0, 3, "cpu")
    with pytest.raises(TypeError, match=r"are ints, got \(1, 2\.0, 3\)"):
        draft_branches(1, 2.0, 3, "cpu")


@pytest.mark.parametrize("shape", [(20, 1), (19, 2), (20,)], ids=str)
def test_refuses_masks_without_a_row_for_each_branch_and_a_bit_for_each_slot(shape):
    fixed = draft_branches(2, 10, 4, "cpu")
    with pytest.raises(ValueError, match=r"20 branches .* 40 slots, 2 int32 words; got \["):
        fixed.tree(torch.arange(80), 0, torch.zeros(shape, dtype=torch.int32))
    words = torch.zeros(20, 1, dtype=torch.int64)
    assert fixed.tree(torch.arange(80), 0, words).mask is words


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("contexts", [[8192], [4097, 0, 1, 64]], ids=str)
def test_real_sizes(contexts, dtype):
    check_every_step(contexts, 10, 3, q_heads=32, kv_heads=8, dim=128, dim_v=128, dtype=dtype)
