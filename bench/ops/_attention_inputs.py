"""Cases and inputs that the two attention entries share: a paged cache and what lies behind it."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bench.checks import Verdict, no_worse_than_torch
from bench.op import Case
from frspec_kernels.draft_attention import draft_branches, pack_mask
from frspec_kernels.tree_attention_inputs import DraftTree, PagedContext
from frspec_kernels.tree_attention_reference import tree_attention_reference

Q_HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
TREE_WIDTH = 4  # children of a node
DRAFT_STEPS, DRAFT_STEP = 4, 2  # slots of a branch; the step that is timed
FP8_SCALES = (0.5, 1.75)  # of keys and values


@dataclass(frozen=True)
class Attention:
    """Inputs of one call. ``visible`` [nodes, keys] is the mask of each request's own keys.

    The trees' keys stand in the cache behind the contexts, at ``tree_slots``, and where the cache
    has the type of q also in ``tree.k`` and ``tree.v``: engines differ in where they look.
    """

    q: Tensor  # [T, QH, D]
    context: PagedContext
    tree: DraftTree
    contexts: tuple[int, ...]
    visible: Tensor
    tree_slots: Tensor  # [B, keys] int64

    @property
    def slots(self) -> list[Tensor]:
        """Each request's cache slots, context first, int64."""
        page = self.context.page_size
        starts = self.context.indptr.tolist()
        lists = []
        for start, length, own in zip(starts, self.contexts, self.tree_slots, strict=False):
            token = torch.arange(length, device=self.q.device)
            pages = self.context.indices[start + token // page].long()
            lists.append(torch.cat([pages * page + token % page, own]))
        return lists


def contexts_of(case: Case) -> tuple[int, ...]:
    """Context of each request; in ragged cases an eighth to fifteen eighths of the mean."""
    batch, mean = case["batch"], case["context"]
    if case["kind"] != "ragged":
        return (mean,) * batch
    return tuple(mean * (1 + 14 * i // max(batch - 1, 1)) // 8 for i in range(batch))


def tree_parents(nodes: int) -> list[int]:
    """Parents of a tree that is full from the root on."""
    return [-1] + [(i - 1) // TREE_WIDTH for i in range(1, nodes)]


def ancestors(parents: Sequence[int]) -> Tensor:
    """``[nodes, nodes]`` bool: a node sees its ancestors and itself."""
    seen = torch.eye(len(parents), dtype=torch.bool)
    for node, parent in enumerate(parents):
        if parent >= 0:
            seen[node] |= seen[parent]
    return seen


class _Cache:
    """Random keys and values of a batch; pages in random order."""

    def __init__(self, case: Case, heads: int, keys: int, device: torch.device, seed: int) -> None:
        self.generator = torch.Generator(device).manual_seed(seed)
        self.device, self.heads = device, heads
        self.fp8 = case["dtype"] == "fp8"
        self.dtype = torch.float16 if device.type == "cpu" else torch.bfloat16
        self.dim = HEAD_DIM if device.type == "cuda" else 16
        page, self.contexts = int(case.params.get("page", 1)), contexts_of(case)
        pages = torch.tensor([-(-length // page) for length in self.contexts])
        total, own = int(pages.sum()), len(self.contexts) * keys
        slots = (total + -(-own // page)) * page
        caches = [self.random(slots, heads, dtype=case.torch_dtype) for _ in "kv"]
        order = torch.randperm(total, device=device, generator=self.generator)
        starts = torch.cat([torch.zeros(1, dtype=torch.long), pages.cumsum(0)])
        lengths = torch.tensor(self.contexts, dtype=torch.int32, device=device)
        scales = FP8_SCALES if self.fp8 else (1.0, 1.0)
        self.context = PagedContext(
            caches[0], caches[1], starts.int().to(device), order.int(),
            lengths if page > 1 else None, page, scales[0], scales[1],
        )  # fmt: skip
        first = total * page
        self.tree_slots = torch.arange(first, first + own, device=device).view(-1, keys)

    def random(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        values = torch.empty(*shape, self.dim, dtype=self.dtype, device=self.device)
        values.normal_(generator=self.generator)
        return values.to(dtype) if dtype is not None and self.fp8 else values


def _heads(device: torch.device) -> tuple[int, int]:
    return (Q_HEADS, KV_HEADS) if device.type == "cuda" else (4, 2)


def tree_inputs(case: Case, device: torch.device, seed: int) -> Attention:
    """The nodes of one tree for every request, keys of the nodes beside the cache."""
    nodes, (q_heads, kv_heads) = case["nodes"], _heads(device)
    cache = _Cache(case, kv_heads, nodes, device, seed)
    batch, visible = len(cache.contexts), ancestors(tree_parents(nodes)).to(device)
    starts = torch.arange(batch + 1, dtype=torch.int32, device=device) * nodes
    mask = pack_mask(visible).repeat(batch, 1)
    context, flat = cache.context, cache.tree_slots.flatten()
    if cache.fp8:
        tree = DraftTree(starts, nodes, mask, slots=flat)
    else:
        tree = DraftTree(starts, nodes, mask, context.k_cache[flat], context.v_cache[flat])
    q = cache.random(batch * nodes, q_heads)
    return Attention(q, context, tree, cache.contexts, visible, cache.tree_slots)


def draft_inputs(case: Case, device: torch.device, seed: int) -> Attention:
    """Branches that have written some of their slots, at step ``DRAFT_STEP``."""
    branches, (q_heads, kv_heads) = case["branches"], _heads(device)
    cache = _Cache(case, kv_heads, branches * DRAFT_STEPS, device, seed)
    batch = len(cache.contexts)
    tree = draft_branches(batch, branches, DRAFT_STEPS, device).tree(
        cache.tree_slots.flatten(), DRAFT_STEP
    )
    key, branch = torch.arange(branches * DRAFT_STEPS), torch.arange(branches)[:, None]
    visible = (key // DRAFT_STEPS == branch) & (key % DRAFT_STEPS <= DRAFT_STEP)
    q = cache.random(batch * branches, q_heads)
    return Attention(q, cache.context, tree, cache.contexts, visible.to(device), cache.tree_slots)


def reference(inputs: Attention) -> tuple[Tensor, Tensor]:
    """PyTorch in the type of q, and the fp64 truth."""
    args = inputs.q, inputs.context, inputs.tree
    truth = tree_attention_reference(*args, compute_dtype=torch.float64)[0]
    return tree_attention_reference(*args)[0], truth


def check(out: Tensor, expected: tuple[Tensor, Tensor]) -> Verdict:
    """No worse than PyTorch, node by node and head by head."""
    return no_worse_than_torch(out.view_as(expected[1]), *expected)


def _sizes(case: Case) -> tuple[int, int, int]:
    """Queries, context tokens and own keys that are seen, of all requests."""
    queries = case["batch"] * case.params.get("nodes", case.params.get("branches"))
    per_query = 1 if "nodes" in case.params else DRAFT_STEP + 1
    return queries, sum(contexts_of(case)), queries * per_query


def least_bytes(case: Case) -> float:
    """Keys and values once, q and out once, a page-table entry a page."""
    queries, tokens, own = _sizes(case)
    width = 1 if case["dtype"] == "fp8" else 2
    cache = 2 * (tokens + own) * KV_HEADS * HEAD_DIM * width
    pages = tokens / int(case.params.get("page", 1))
    return cache + 2 * queries * Q_HEADS * HEAD_DIM * 2 + 4 * pages


def flops(case: Case) -> float:
    """Two products over the context for each query head."""
    queries, tokens, _ = _sizes(case)
    return 4 * queries / case["batch"] * tokens * Q_HEADS * HEAD_DIM
