# pyright: reportArgumentType=false
from dataclasses import dataclass, replace

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.checks import no_worse_than_torch
from frspec_kernels.draft_attention import draft_branches, pack_mask
from frspec_kernels.split_merge import plan_splits
from frspec_kernels.tree_attention import tree_attention, tree_attention_workspace
from frspec_kernels.tree_attention_inputs import AttentionShape, DraftTree, PagedContext
from frspec_kernels.tree_attention_launch import LaunchShape, TreeAttentionConfig, launch_config
from frspec_kernels.tree_attention_reference import tree_attention_reference

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
# tl.dot on bf16 is not right under the interpreter; small shapes keep it quick.
DTYPES = [torch.float16, torch.bfloat16] if CUDA else [torch.float16]
HEAD_DIM = 64 if CUDA else 16
SMALL = TreeAttentionConfig(64 if CUDA else 16, 32, 4, 2, 2, prefetch=True)


def chain(n):
    return [i - 1 for i in range(n)]


def star(n):
    return [-1] + [0] * (n - 1)


def full(n):
    return [-1] + [(i - 1) // 2 for i in range(1, n)]


def random_tree(n):
    return [-1] + [int(torch.randint(0, i, ())) for i in range(1, n)]


def closure(parents, width):
    """Ancestors-and-self, and depths, of a tree given by its parents."""
    seen = torch.zeros(len(parents), width, dtype=torch.bool)
    depths = torch.zeros(len(parents), dtype=torch.int32)
    for i, parent in enumerate(parents):
        if parent >= 0:
            seen[i] = seen[parent]
            depths[i] = depths[parent] + 1
        seen[i, i] = True
    return seen, depths


@dataclass
class Problem:
    """Inputs of a ragged batch; every cache slot that no request lists is NaN."""

    contexts: list[int]
    trees: list[list[int]]
    q_heads: int = 4
    kv_heads: int = 2
    dim: int = HEAD_DIM
    dim_v: int = HEAD_DIM
    page: int = 1
    in_cache: bool = False
    padded_table: bool = False
    dtype: torch.dtype = torch.float16
    cache_dtype: torch.dtype | None = None

    def __post_init__(self):
        pages = [-(-c // self.page) for c in self.contexts]
        nodes = [len(t) for t in self.trees]
        free = torch.randperm(2 * sum(pages) + sum(nodes) + 3)
        self.slots = free.numel() * self.page
        taken, own = free[: sum(pages)], free[sum(pages) :][: sum(nodes)] * self.page
        self.k_cache = self._poisoned(self.slots, self.dim)
        self.v_cache = self._poisoned(self.slots, self.dim_v)
        starts = torch.tensor([0, *pages]).cumsum(0)
        for length, start in zip(self.contexts, starts, strict=False):
            token = torch.arange(length)
            self._fill(taken[start + token // self.page] * self.page + token % self.page)
        self.q = torch.randn(sum(nodes), self.q_heads, self.dim).to(self.dtype)
        self.context = self._context(taken, starts, pages)
        self.tree = self._tree(nodes, own)

    def _poisoned(self, rows, dim):
        cache = torch.full((rows, self.kv_heads, dim), float("nan"), dtype=self.dtype)
        return cache.to(self.cache_dtype or self.dtype)

    def _fill(self, slots):
        for cache in (self.k_cache, self.v_cache):
            values = torch.randn(len(slots), *cache.shape[1:])
            cache[slots] = values.to(self.dtype).to(cache.dtype)

    def _context(self, taken, starts, pages):
        lengths = torch.tensor(self.contexts, dtype=torch.int32)
        if self.padded_table:
            width = max(pages) + 2
            table = torch.full((len(pages), width), self.slots // self.page - 1)
            for row, start, count in zip(table, starts, pages, strict=False):
                row[:count] = taken[start : start + count]
            taken, starts = table.flatten(), torch.arange(len(pages)) * width
        scales = {"k_scale": 0.5, "v_scale": 1.75} if self.cache_dtype else {}
        listed = lengths if self.page > 1 or self.padded_table else None
        return PagedContext(
            self.k_cache, self.v_cache, starts.int(), taken, listed, self.page, **scales
        )

    def _tree(self, nodes, own):
        masks, depths = zip(*(closure(t, max(nodes)) for t in self.trees), strict=True)
        starts = torch.tensor([0, *nodes]).cumsum(0).int()
        keys: dict = {"slots": own}
        if self.in_cache:
            self._fill(own)
        else:
            k = torch.randn(sum(nodes), self.kv_heads, self.dim).to(self.dtype)
            keys = {"k": k, "v": torch.randn(*k.shape[:2], self.dim_v).to(self.dtype)}
        mask = pack_mask(torch.cat(masks))
        return DraftTree(starts, max(nodes), mask, depths=torch.cat(depths), **keys)


def to_device(obj):
    moved = {k: v.to(DEVICE) for k, v in vars(obj).items() if isinstance(v, torch.Tensor)}
    return replace(obj, **moved)


def run_and_check(problem, config: TreeAttentionConfig | None = SMALL, with_lse=True, **options):
    q, context, tree = problem.q.to(DEVICE), to_device(problem.context), to_device(problem.tree)
    if options.get("sinks") is not None:
        options["sinks"] = options["sinks"].to(DEVICE)
    return check_inputs_against_torch(q, context, tree, config, with_lse, **options)


def check_inputs_against_torch(
    q, context, tree, config: TreeAttentionConfig | None = SMALL, with_lse=True, **options
):
    shape = (q.shape[0], q.shape[1], context.v_cache.shape[2])
    out = torch.full(shape, float("nan"), dtype=q.dtype, device=q.device)
    lse = torch.full(shape[:2], float("nan"), device=q.device) if with_lse else None
    tree_attention(q, context, tree, out=out, lse=lse, config=config, **options)
    truth, true_lse = tree_attention_reference(
        q, context, tree, compute_dtype=torch.float64, **options
    )
    same, same_lse = tree_attention_reference(q, context, tree, **options)
    verdict = no_worse_than_torch(out, same, truth, "out")
    assert verdict.ok, verdict.why
    if lse is not None:
        verdict = no_worse_than_torch(lse, same_lse.float(), true_lse, "lse")
        assert verdict.ok, verdict.why
    return out


TREES = {"chain": chain, "star": star, "full": full, "random": random_tree}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", TREES)
def test_ragged_batch_of_trees(shape, dtype):
    build = TREES[shape]
    run_and_check(Problem([70, 0, 33, 1], [build(5), build(1), build(40), build(3)], dtype=dtype))


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
]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: f"{c.programs_per_sm}-{c.block_n}")
def test_every_configuration_is_right(config):
    run_and_check(Problem([150, 20], [random_tree(12), random_tree(5)]), config)


def test_unseen_slots_of_the_tree_may_hold_nan():
    """Draft decoding lists slots that later steps will fill."""
    batch, branches, steps = 2, 3, 4
    fixed = draft_branches(batch, branches, steps, DEVICE)
    problem = Problem([37, 5], [[-1] * (branches * steps)] * batch, in_cache=True)
    problem.q = problem.q[: batch * branches]
    q, context, tree = problem.q.to(DEVICE), to_device(problem.context), to_device(problem.tree)
    assert tree.slots is not None
    own = tree.slots.view(batch, branches, steps).clone()
    for step in range(steps):
        k, v = context.k_cache.clone(), context.v_cache.clone()
        k[own[..., step + 1 :]] = float("nan")
        v[own[..., step + 1 :]] = float("nan")
        now = replace(context, k_cache=k, v_cache=v)
        out = tree_attention(q, now, fixed.tree(own.flatten(), step), config=SMALL)
        lists = [own[b, j, : step + 1] for b in range(batch) for j in range(branches)]
        assert no_worse_than_torch(out, *branch_by_branch(q, context, lists, branches)).ok


def branch_by_branch(q, context, lists, branches):
    """Every branch alone, on its own list of slots: PyTorch in q's type, and in fp64."""
    results: dict = {q.dtype: [], torch.float64: []}
    for row, own in enumerate(lists):
        start, end = context.indptr[row // branches : row // branches + 2].tolist()
        slots = torch.cat([context.indices[start:end], own])
        for dtype, rows in results.items():
            k = context.k_cache[slots].to(dtype).repeat_interleave(2, 1)
            v = context.v_cache[slots].to(dtype).repeat_interleave(2, 1)
            scores = torch.einsum("hd,nhd->hn", q[row].to(dtype), k) * q.shape[-1] ** -0.5
            probs = torch.softmax(scores.to(max(dtype, torch.float32, key=lambda t: t.itemsize)), 1)
            rows.append(torch.einsum("hn,nhd->hd", probs.to(dtype), v))
    return torch.stack(results[q.dtype]), torch.stack(results[torch.float64])


@triton.jit
def _plan_kernel(indptr, keys, out, batch, slots, min_tiles, N: tl.constexpr, B: tl.constexpr):
    chunk, splits, program, part = plan_splits(
        indptr, indptr, keys, batch, slots, min_tiles, -1, False, N, B
    )
    offs = tl.arange(0, B)
    tl.store(out + offs, chunk)
    tl.store(out + B + offs, splits)
    tl.store(out + 2 * B + offs, program)
    tl.store(out + 3 * B + offs, part)


@given(
    lengths=st.lists(st.integers(0, 5000), min_size=1, max_size=8),
    slots=st.integers(1, 70),
    min_tiles=st.integers(1, 4),
)
@settings(max_examples=40 if not CUDA else 300, deadline=None)
def test_plan_covers_every_tile_once_within_grid_and_workspace(lengths, slots, min_tiles):
    batch = len(lengths)
    indptr = torch.tensor([0, *lengths], device=DEVICE).cumsum(0).int()
    keys = torch.arange(batch + 1, device=DEVICE).int() * 5
    block = triton.next_power_of_2(batch)
    out = torch.full((4, block), -1, dtype=torch.int32, device=DEVICE)
    _plan_kernel[(1,)](indptr, keys, out, batch, slots, min_tiles, N=32, B=block)
    chunk, splits, program, part = out[:, :batch].tolist()
    parts = 0
    for b, length in enumerate(lengths):
        tiles = -(-length // 32) + 1
        assert (splits[b] - 1) * chunk[b] < tiles <= splits[b] * chunk[b]
        assert splits[b] == 1 or chunk[b] >= min_tiles
        assert program[b] == sum(splits[:b])
        assert part[b] == parts
        parts += splits[b] if splits[b] > 1 else 0
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
    with pytest.raises(ValueError, match="step is in"):
        draft_branches(1, 2, 3, "cpu").tree(torch.arange(6), 3)


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
            config = launch_config(rows, 128)
            shape = LaunchShape.of(config, batch=batch, kv_heads=8, rows=rows, sm_count=132)
            assert shape.m_tiles * config.block_m >= rows
            assert shape.grid[2] <= shape.num_slots + batch
            assert 3 * (shape.max_parts - 1) <= 4 * shape.num_slots
