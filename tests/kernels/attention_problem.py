# pyright: reportArgumentType=false
"""Random batches of trees over a poisoned cache, and the check that both attention tests apply."""

from dataclasses import dataclass, replace

import torch

from bench.checks import no_worse_than_torch
from frspec_kernels.draft_attention import pack_mask
from frspec_kernels.tree_attention import tree_attention
from frspec_kernels.tree_attention_inputs import DraftTree, PagedContext
from frspec_kernels.tree_attention_launch import TreeAttentionConfig
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
    q, context, tree, config: TreeAttentionConfig | None = SMALL, with_lse=True, workspace=None,
    **options,
):  # fmt: skip
    shape = (q.shape[0], q.shape[1], context.v_cache.shape[2])
    out = torch.full(shape, float("nan"), dtype=q.dtype, device=q.device)
    lse = torch.full(shape[:2], float("nan"), device=q.device) if with_lse else None
    tree_attention(
        q, context, tree, out=out, lse=lse, config=config, workspace=workspace, **options
    )
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
