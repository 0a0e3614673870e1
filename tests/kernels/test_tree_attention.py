# pyright: reportArgumentType=false
from dataclasses import replace

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st

from frspec_kernels.split_merge import plan_splits, split_tiles
from frspec_kernels.tree_attention import tree_attention, tree_attention_workspace
from frspec_kernels.tree_attention_inputs import AttentionShape
from frspec_kernels.tree_attention_launch import (
    LaunchShape,
    TreeAttentionConfig,
    launch_config,
    multiprocessors,
)
from tests.kernels.attention_problem import (
    CUDA,
    DEVICE,
    DTYPES,
    HEAD_DIM,
    SMALL,
    Problem,
    chain,
    check_inputs_against_torch,
    full,
    random_tree,
    run_and_check,
    star,
    to_device,
)

TREES = {"chain": chain, "star": star, "full": full, "random": random_tree}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", TREES)
def test_ragged_batch_of_trees(shape, dtype):
    build = TREES[shape]
    run_and_check(Problem([70, 0, 33, 1], [build(5), build(1), build(40), build(3)], dtype=dtype))


@pytest.mark.parametrize("contexts", [[70, 5, 0, 9], [0, 0, 0, 0]], ids=str)
def test_requests_without_nodes(contexts):
    run_and_check(Problem(contexts, [[], random_tree(5), [], random_tree(3)]))


@pytest.mark.parametrize("context", [0, 1, 15, 16, 17, 31, 32, 33])
def test_contexts_around_pages_and_tiles(context):
    run_and_check(Problem([context], [random_tree(7)], page=16))


OPTIONS = {
    "page-size-1-padded-table": {"padded_table": True},
    "page-size-4": {"page": 4},
    "page-size-16-padded-table": {"page": 16, "padded_table": True},
    "tree-in-cache": {"in_cache": True},
    "tree-in-cache-page-size-4": {"in_cache": True, "page": 4},
    "mha": {"q_heads": 2},
    "mqa": {"kv_heads": 1},
    "group-of-3": {"q_heads": 6},
    "head-dim-24": {"dim": 24, "dim_v": 24},
    "value-dim-32": {"dim_v": 32},
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", OPTIONS)
def test_layouts(name, dtype):
    run_and_check(Problem([70, 9], [random_tree(6), random_tree(2)], dtype=dtype, **OPTIONS[name]))


@pytest.mark.parametrize("in_cache", [False, True])
@pytest.mark.parametrize("window", [0, 1, 2, 20, 64, 1000])
def test_sliding_window(window, in_cache):
    problem = Problem([70, 3, 0], [chain(6), random_tree(20), star(3)], in_cache=in_cache)
    run_and_check(problem, window_left=window)


def test_logit_cap():
    problem = Problem([40], [random_tree(6)])
    run_and_check(problem, logit_cap=2.0)
    run_and_check(problem, logit_cap=2.0, window_left=5)


def test_sm_scale():
    run_and_check(Problem([40], [random_tree(6)]), sm_scale=0.7)


@pytest.mark.parametrize("slots_per_sm", [1, 8])
def test_sinks_with_and_without_splits(slots_per_sm):
    config = replace(SMALL, programs_per_sm=slots_per_sm)
    problem = Problem([70, 0], [random_tree(6), chain(2)])
    run_and_check(problem, config, sinks=torch.tensor([0.5, -3.0, 9.0, float("-inf")]))


def test_a_node_that_sees_nothing_gets_zeros():
    problem = Problem([0, 5], [chain(3), chain(2)])
    problem.tree.mask[1] = 0
    out = run_and_check(problem)
    assert (out[1] == 0).all()


def test_without_lse_and_with_int64_words():
    problem = Problem([40], [random_tree(40)])
    words = problem.tree.mask.contiguous().view(torch.int64)
    problem.tree = replace(problem.tree, mask=words)
    run_and_check(problem, with_lse=False)


def test_strided_rows():
    """q, k and v as slices of one fused projection, the cache as halves of one buffer."""
    problem = Problem([40], [random_tree(5)])
    wide = torch.full((5, 4, 3 * HEAD_DIM), float("nan"), dtype=torch.float16)
    wide[..., HEAD_DIM : 2 * HEAD_DIM] = problem.q
    problem.q = wide[..., HEAD_DIM : 2 * HEAD_DIM]
    both = torch.stack([problem.k_cache, problem.v_cache], 2)
    context = replace(problem.context, k_cache=both[:, :, 0], v_cache=both[:, :, 1])
    problem.context = context
    run_and_check(problem)


CONFIGS = [
    SMALL,
    replace(SMALL, programs_per_sm=1),
    replace(SMALL, programs_per_sm=9, min_tiles=2),
    replace(SMALL, prefetch=False),
    replace(SMALL, block_m=2 * SMALL.block_m, block_n=64),
    replace(SMALL, programs_per_sm=16, merge_block_s=2),
    replace(SMALL, merge_block_r=8),
    replace(SMALL, merge_block_s=4, merge_block_r=1, merge_warps=1),
]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: f"{c.programs_per_sm}-{c.block_n}")
def test_every_configuration_is_right(config):
    run_and_check(Problem([150, 20], [random_tree(12), random_tree(5)]), config)


@pytest.mark.parametrize("context", [0, 5, 32, 64, 150, 320])
@pytest.mark.parametrize("nodes", [1, 12, 70])
@pytest.mark.parametrize("step", [1, 2])
def test_whole_tiles_and_a_masked_tail(context, nodes, step):
    run_and_check(Problem([context], [random_tree(nodes)]), replace(SMALL, step=step))


@pytest.mark.parametrize("window", [-1, 20, 64, 100])
@pytest.mark.parametrize("step", [1, 2])
def test_windows_over_several_requests(window, step):
    problem = Problem([150, 3, 64], [random_tree(12), random_tree(5), chain(3)], in_cache=True)
    run_and_check(problem, replace(SMALL, step=step), window_left=window)


@triton.jit
def _plan_kernel(
    indptr, keys, out, batch, slots, min_tiles, N: tl.constexpr, STEP: tl.constexpr,
    B: tl.constexpr,
):  # fmt: skip
    splits, program, part = plan_splits(
        indptr, indptr, keys, batch, slots, min_tiles, -1, False, N, STEP, B
    )
    offs = tl.arange(0, B)
    tl.store(out + offs, splits)
    tl.store(out + B + offs, program)
    tl.store(out + 2 * B + offs, part)


@triton.jit
def _tiles_kernel(out, splits, whole, tail, STEP: tl.constexpr):
    for split in range(splits):
        first, last, tail_first, tail_last = split_tiles(split, splits, whole, tail, STEP)
        tl.store(out + 4 * split, first)
        tl.store(out + 4 * split + 1, last)
        tl.store(out + 4 * split + 2, tail_first)
        tl.store(out + 4 * split + 3, tail_last)


@given(
    lengths=st.lists(st.integers(0, 5000), min_size=1, max_size=8),
    nodes=st.integers(0, 100),
    slots=st.integers(1, 70),
    min_tiles=st.integers(1, 4),
    step=st.integers(1, 3),
)
@settings(max_examples=40 if not CUDA else 300, deadline=None)
def test_plan_covers_every_tile_once_within_grid_and_workspace(
    lengths, nodes, slots, min_tiles, step
):
    batch = len(lengths)
    indptr = torch.tensor([0, *lengths], device=DEVICE).cumsum(0).int()
    keys = torch.arange(batch + 1, device=DEVICE).int() * nodes
    block = triton.next_power_of_2(batch)
    out = torch.full((3, block), -1, dtype=torch.int32, device=DEVICE)
    _plan_kernel[(1,)](indptr, keys, out, batch, slots, min_tiles, N=32, STEP=step, B=block)
    splits, program, part = out[:, :batch].tolist()
    parts = 0
    for b, length in enumerate(lengths):
        whole, tail = length // 32, (length % 32 > 0) + -(-nodes // 32)
        assert splits[b] >= 1
        assert splits[b] == 1 or splits[b] * min_tiles <= whole // step + tail
        assert program[b] == sum(splits[:b])
        assert part[b] == parts
        parts += splits[b] if splits[b] > 1 else 0
        tiles = torch.full((splits[b], 4), -1, dtype=torch.int32, device=DEVICE)
        _tiles_kernel[(1,)](tiles, splits[b], whole, tail, STEP=step)
        for first, count in ((0, whole), (2, tail)):
            begin, end = tiles[:, first].tolist(), tiles[:, first + 1].tolist()
            taken = [t for i, j in zip(begin, end, strict=True) for t in range(i, j)]
            assert taken == list(range(count))
        assert all(i % step == 0 for i in tiles[:, 0].tolist() if i < whole)
    config = TreeAttentionConfig(16, 32, 1, 1, slots)
    shape = LaunchShape.of(config, batch=batch, kv_heads=1, rows=1, sm_count=1)
    assert sum(splits) <= shape.grid[2]
    assert parts <= shape.max_parts


def test_refuses_what_does_not_fit():
    p = Problem([20], [chain(3)])
    q, context, tree = p.q, p.context, p.tree
    for bad, error, message in [
        ((q.float(), context, tree), TypeError, "bf16 or fp16"),
        ((q[:2], context, tree), ValueError, "mask is"),
        ((q, replace(context, page_size=4), tree), ValueError, "needs lengths"),
        ((q, replace(context, k_scale=-1.0), tree), ValueError, "k_scale"),
        ((q, context, replace(tree, slots=torch.arange(3))), ValueError, "give one of them"),
        ((q, context, replace(tree, mask=tree.mask.bool())), TypeError, "pack the bits"),
        ((q, replace(context, k_cache=context.k_cache[:, :1]), tree), ValueError, "do not fit"),
    ]:
        with pytest.raises(error, match=message):
            tree_attention(*bad)
    with pytest.raises(ValueError, match="depths"):
        tree_attention(q, context, replace(tree, depths=None), window_left=4)
    small = tree_attention_workspace(
        AttentionShape(4, 2, HEAD_DIM, HEAD_DIM), batch=1, max_nodes=1, device=q.device
    )
    with pytest.raises(ValueError, match="too small"):
        tree_attention(q, context, tree, workspace=small)


BIG = [
    ("4096x200", [4096], [200], 64),
    ("100000x60", [100_000], [60], 128),
    ("100000x1", [100_000], [1], 128),
    ("ragged", [4095, 0, 20_000, 1, 4097, 63, 64, 65], [60, 1, 16, 200, 33, 2, 7, 64], 128),
    ("head-dim-96", [4097, 31], [60, 5], 96),
    ("head-dim-256", [4097, 31], [60, 5], 256),
]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("name", "contexts", "nodes", "dim"), BIG, ids=[b[0] for b in BIG])
def test_shipped_configurations_on_real_sizes(name, contexts, nodes, dim, dtype):
    problem = Problem(
        contexts, [random_tree(n) for n in nodes], 32, 8, dim, dim, page=16, dtype=dtype
    )
    run_and_check(problem, config=None, sinks=torch.randn(32))


@pytest.mark.gpu
@pytest.mark.parametrize("shape", TREES)
def test_shapes_of_trees_on_real_sizes(shape):
    contexts, nodes = [0, 1, 15, 16, 17, 4096, 100_000], [200, 1, 60, 16, 33, 200, 60]
    trees = [TREES[shape](n) for n in nodes]
    problem = Problem(contexts, trees, 32, 8, 128, 128, page=16, dtype=torch.bfloat16)
    run_and_check(problem, config=None)


@pytest.mark.gpu
@pytest.mark.parametrize("in_cache", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_fp8_cache(dtype, in_cache):
    problem = Problem(
        [4097, 31], [random_tree(60), chain(5)], 32, 8, 128, 128, in_cache=in_cache, dtype=dtype,
        cache_dtype=torch.float8_e4m3fn,
    )  # fmt: skip
    run_and_check(problem, config=None)


@pytest.mark.gpu
def test_graph_replay_with_changed_contexts_equals_eager():
    nodes = [16, 7, 33, 1]
    lengths = [[4000, 100, 0, 77], [5, 9000, 64, 1], [0, 0, 0, 0], [1, 1, 20_000, 4000]]
    widest = Problem([20_000] * 4, [random_tree(n) for n in nodes], 32, 8, 128, 128)
    q, context, tree = widest.q.to(DEVICE), to_device(widest.context), to_device(widest.tree)
    now = torch.zeros(4, dtype=torch.int32, device=DEVICE)
    context = replace(context, lengths=now)
    workspace = tree_attention_workspace(
        AttentionShape(32, 8, 128, 128), batch=4, max_nodes=33, device=q.device
    )
    out = torch.full_like(q, float("nan"))
    tree_attention(q, context, tree, out=out, workspace=workspace)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tree_attention(q, context, tree, out=out, workspace=workspace)
    for changed in lengths:
        now.copy_(torch.tensor(changed))
        out.fill_(float("nan"))
        workspace.part_out.fill_(float("nan"))
        graph.replay()
        eager = tree_attention(q, context, tree)
        assert torch.equal(out, eager)
        check_inputs_against_torch(q, context, tree, None, with_lse=False)


def test_launch_shapes_do_not_depend_on_contexts_and_stay_bounded():
    for batch in (1, 2, 32, 256):
        for rows in (1, 16, 64, 240, 800):
            config = launch_config(rows, 128, batch)
            shape = LaunchShape.of(config, batch=batch, kv_heads=8, rows=rows, sm_count=132)
            assert shape.m_tiles * config.block_m >= rows
            assert shape.grid[2] <= shape.num_slots + batch
            assert 3 * (shape.max_parts - 1) <= 4 * shape.num_slots


def test_a_workspace_serves_every_smaller_launch():
    sizes = AttentionShape(4, 2, HEAD_DIM, HEAD_DIM)
    device = torch.device(DEVICE)
    workspace = tree_attention_workspace(sizes, batch=8, max_nodes=20, device=device)
    for contexts, nodes in (([150], [12]), ([150, 90], [1, 3])):
        problem = Problem(contexts, [random_tree(n) for n in nodes])
        q, context, tree = problem.q.to(DEVICE), to_device(problem.context), to_device(problem.tree)
        workspace.part_out.fill_(float("nan"))
        workspace.part_lse.fill_(float("nan"))
        check_inputs_against_torch(
            q, context, tree, SMALL if not CUDA else None, workspace=workspace
        )


def test_a_workspace_holds_the_parts_of_every_smaller_launch():
    """Also of few nodes, whose launch has more slots than the largest tree's."""
    sizes = AttentionShape(4, 1, 128, 128)
    device = torch.device(DEVICE)
    workspace = tree_attention_workspace(sizes, batch=8, max_nodes=60, device=device)
    for batch in (1, 2, 8):
        for nodes in (1, 10, 16, 17, 32, 33, 60):
            config = launch_config(nodes * 4, 128, batch)
            launch = LaunchShape.of(
                config, batch=batch, kv_heads=1, rows=nodes * 4, sm_count=multiprocessors(device)
            )
            assert workspace.part_out.shape[0] >= launch.max_parts * nodes * 4
            assert workspace.part_lse.shape == workspace.part_out.shape[:1]
