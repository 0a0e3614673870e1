"""Every forward mode against dense attention in fp64 over slots that the test lists by itself.

The oracle never sees a plan: it gets, for each query, the columns of ``req_to_token`` that SGLang's
layout makes visible to it.
"""

import random

import pytest
import torch

from sgl_frspec.cpu_engine.attend import attend
from sgl_frspec.cpu_engine.plan import (
    plan_decode,
    plan_draft_decode,
    plan_extend,
    plan_target_verify,
)

HEADS, KV_HEADS, DIM, V_DIM = 6, 2, 16, 24
SLOTS, CONTEXT = 400, 90
SCALE = 0.31


@pytest.fixture
def pool():
    """Keys, values, and three requests' rows: scattered, contiguous, and with a jump."""
    order = (torch.randperm(SLOTS - 150)[: 2 * CONTEXT] + 150).view(2, CONTEXT)
    rows = torch.stack([order[0], torch.arange(1, CONTEXT + 1), order[1].sort().values])
    keys = torch.full((SLOTS, KV_HEADS, DIM), float("nan"))
    values = torch.full((SLOTS, KV_HEADS, V_DIM), float("nan"))
    used = rows.flatten()
    keys[used] = torch.randn(used.numel(), KV_HEADS, DIM) * 3
    values[used] = torch.randn(used.numel(), KV_HEADS, V_DIM)
    return rows.int(), keys, values


def dense(query, keys, values, visible_slots):
    """One query ``[Hq, D]`` over the given slots, fp64, head by head."""
    out = []
    for head in range(HEADS):
        k = keys[visible_slots, head // (HEADS // KV_HEADS)].double()
        v = values[visible_slots, head // (HEADS // KV_HEADS)].double()
        weights = torch.softmax(SCALE * (k @ query[head].double()), dim=0)
        out.append(weights @ v)
    return torch.stack(out)


def check(plans, pool, visible: list[list[int]], request_of: list[int], window=None):
    rows, keys, values = pool
    queries = torch.randn(len(visible), HEADS, DIM)
    out = torch.full((len(visible), HEADS, V_DIM), float("nan"))
    for plan in plans:
        out[plan.start : plan.stop] = attend(queries, keys, values, plan, SCALE, window)
    for i, columns in enumerate(visible):
        expected = dense(queries[i], keys, values, rows[request_of[i], columns].long())
        torch.testing.assert_close(out[i].double(), expected, rtol=1e-5, atol=1e-5)


def test_decode(pool):
    lengths = [1, 37, CONTEXT]
    plans = plan_decode(pool[0], lengths)
    check(plans, pool, [list(range(n)) for n in lengths], [0, 1, 2])


@pytest.mark.parametrize(
    ("prefixes", "news"),
    [([0, 0, 0], [5, 1, 30]), ([12, 33, 1], [7, 1, 20]), ([0, 8, 0], [3, 4, 1])],
)
def test_extend(pool, prefixes, news):
    visible, request_of = [], []
    for b, (prefix, new) in enumerate(zip(prefixes, news, strict=True)):
        for i in range(new):
            visible.append(list(range(prefix + i + 1)))
            request_of.append(b)
    check(plan_extend(pool[0], prefixes, news), pool, visible, request_of)


@pytest.mark.parametrize("seed", range(3))
def test_verify_sees_prefix_and_ancestors(pool, seed):
    draw = random.Random(seed)
    nodes, prefixes = 9, [4, 1, 50]
    mask = torch.zeros(3, nodes, nodes, dtype=torch.bool)
    visible, request_of = [], []
    for b, prefix in enumerate(prefixes):
        parents = [-1] + [draw.randrange(node) for node in range(1, nodes)]
        for node in range(nodes):
            path, at = [], node
            while at != -1:
                path.append(at)
                at = parents[at]
            mask[b, node, path] = True
            visible.append([*range(prefix), *(prefix + p for p in path)])
            request_of.append(b)
    buffer = torch.cat([mask.flatten(), torch.ones(40, dtype=torch.bool)])
    check(plan_target_verify(pool[0], prefixes, buffer, nodes), pool, visible, request_of)


@pytest.mark.parametrize(
    ("top_k", "steps", "page_size"), [(1, 4, 1), (4, 3, 1), (3, 4, 4), (1, 3, 8), (2, 5, 4)]
)
def test_draft_branches_share_the_prefix(pool, top_k, steps, page_size):
    prefixes = [5, 8, 23]
    for step in range(steps - 1):
        visible, request_of = [], []
        for b, prefix in enumerate(prefixes):
            for branch in range(top_k):
                start = branch_start(prefix, branch, top_k, steps, page_size)
                visible.append([*range(prefix), *range(start, start + step + 1)])
                request_of.append(b)
        plans = plan_draft_decode(pool[0], prefixes, top_k, steps, step, page_size)
        check(plans, pool, visible, request_of)


def branch_start(prefix: int, branch: int, top_k: int, steps: int, page_size: int) -> int:
    """SGLang's layout: branches one after another, on whole pages of their own if pages matter.

    With pages, branch 0 goes on in the prefix's last page, and every further one repeats that
    page's tail before its own slots.
    """
    if page_size == 1 or top_k == 1:
        return prefix + branch * steps
    first_page = prefix - prefix % page_size
    pages = 0
    while first_page + pages * page_size < prefix + steps:
        pages += 1
    return prefix + branch * pages * page_size


@pytest.mark.parametrize("window", [0, 3, 30])
def test_a_window_goes_by_positions(pool, window):
    """The oracle walks back from each query over the tokens of its own path, and stops."""
    lengths = [1, 37, CONTEXT]
    visible = [list(range(n))[-window - 1 :] for n in lengths]
    check(plan_decode(pool[0], lengths), pool, visible, [0, 1, 2], window)

    prefixes, news = [12, 0, 1], [7, 40, 5]
    visible = [
        list(range(prefix + i + 1))[-window - 1 :]
        for prefix, new in zip(prefixes, news, strict=True)
        for i in range(new)
    ]
    request_of = [b for b, new in enumerate(news) for _ in range(new)]
    check(plan_extend(pool[0], prefixes, news), pool, visible, request_of, window)

    # Node 3 is a child of node 1, node 4 of node 3: siblings share a position.
    paths = [[0], [0, 1], [0, 2], [0, 1, 3], [0, 1, 3, 4]]
    mask = torch.zeros(3, 5, 5, dtype=torch.bool)
    for node, path in enumerate(paths):
        mask[:, node, path] = True
    prefixes = [2, 9, 50]
    visible = [
        [*range(prefix), *(prefix + p for p in path)][-window - 1 :]
        for prefix in prefixes
        for path in paths
    ]
    request_of = [b for b in range(3) for _ in paths]
    check(plan_target_verify(pool[0], prefixes, mask, 5), pool, visible, request_of, window)

    top_k, steps, step = 3, 4, 2
    visible, request_of = [], []
    for b, prefix in enumerate(prefixes):
        for branch in range(top_k):
            start = branch_start(prefix, branch, top_k, steps, 1)
            own = range(start, start + step + 1)
            visible.append([*range(prefix), *own][-window - 1 :])
            request_of.append(b)
    plans = plan_draft_decode(pool[0], prefixes, top_k, steps, step, 1)
    check(plans, pool, visible, request_of, window)


def test_cache_of_another_type_is_converted(pool):
    rows, keys, values = pool
    [plan] = plan_decode(rows[:1], [20])
    query = torch.randn(1, HEADS, DIM)
    out = attend(query, keys.bfloat16(), values.bfloat16(), plan, SCALE)
    slots = rows[0, :20].long()
    expected = dense(query[0], keys.bfloat16().float(), values.bfloat16().float(), slots)
    assert out.dtype == torch.float32
    torch.testing.assert_close(out[0].double(), expected, rtol=1e-5, atol=1e-5)
