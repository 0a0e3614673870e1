# pyright: reportArgumentType=false, reportOptionalSubscript=false
"""Everything that tree attention refuses, with the offending value and the remedy."""

import re
from dataclasses import replace
from unittest.mock import MagicMock

import pytest
import torch

from frspec_kernels import tree_attention as module
from frspec_kernels.tree_attention import tree_attention, tree_attention_workspace
from frspec_kernels.tree_attention_inputs import AttentionShape, TreeAttentionWorkspace
from tests.kernels.attention_problem import DEVICE, HEAD_DIM, SMALL, Problem, chain, to_device

NAN, INF = float("nan"), float("inf")
FP8 = torch.float8_e4m3fn


def empty(*shape, dtype=torch.float16, device=DEVICE):
    return torch.empty(shape, dtype=dtype, device=device)


def refused(error, message, *, context=None, tree=None, q=None, problem=None, **options):
    """The call of a good problem with these parts replaced."""
    p = problem or Problem([20, 5], [chain(3), chain(2)])
    good_context, good_tree = to_device(p.context), to_device(p.tree)
    query = p.q.to(DEVICE) if q is None else q
    with pytest.raises(error, match=message):
        tree_attention(
            query, replace(good_context, **(context or {})), replace(good_tree, **(tree or {})),
            config=SMALL, **options,
        )  # fmt: skip


def test_the_good_problem_is_taken():
    p = Problem([20, 5], [chain(3), chain(2)])
    tree_attention(p.q.to(DEVICE), to_device(p.context), to_device(p.tree), config=SMALL)


D = HEAD_DIM
OUT = [
    (lambda: empty(5, 4, D, dtype=torch.float32), TypeError, r"out is torch.float16.*float32"),
    (lambda: empty(4, 4, D), ValueError, rf"out is \[5, 4, {D}\].*got \[4, 4, {D}\]"),
    (lambda: empty(5, 4, D // 2), ValueError, rf"got \[5, 4, {D // 2}\]"),
    (lambda: empty(5, 4, 2 * D)[..., ::2], ValueError, "contiguous rows.*strides"),
    (lambda: empty(1, 4, D).expand(5, 4, D), ValueError, rf"apart.*strides \[0, {D}, 1\]"),
    (lambda: empty(5, 4, D, device="meta"), ValueError, "out is on meta; move it to"),
]


@pytest.mark.parametrize(("make", "error", "message"), OUT)
def test_outputs(make, error, message):
    refused(error, message, out=make())


LSE = [
    (lambda: empty(5, 4), TypeError, r"lse is float32, got torch\.float16"),
    (lambda: empty(4, 5, dtype=torch.float32), ValueError, r"lse is \[5, 4\].*got \[4, 5\]"),
    (lambda: empty(4, 5, dtype=torch.float32).T, ValueError, r"strides \[1, 5\]"),
    (lambda: empty(1, 4, dtype=torch.float32).expand(5, 4), ValueError, r"strides \[0, 1\]"),
    (lambda: empty(5, 4, dtype=torch.float32, device="meta"), ValueError, "lse is on meta"),
]


@pytest.mark.parametrize(("make", "error", "message"), LSE)
def test_log_sum_exps(make, error, message):
    refused(error, message, lse=make())


SINKS = [
    (lambda: empty(4, dtype=torch.float64), TypeError, r"sinks.*got torch\.float64; convert"),
    (lambda: empty(2), ValueError, r"sinks are contiguous \[4\], one a query head, got \[2\]"),
    (lambda: empty(8)[::2], ValueError, r"strides \[2\]"),
    (lambda: empty(1, 4), ValueError, r"got \[1, 4\]"),
    (lambda: empty(4, device="meta"), ValueError, "sinks is on meta"),
]


@pytest.mark.parametrize(("make", "error", "message"), SINKS)
def test_sinks(make, error, message):
    refused(error, message, sinks=make())


def scratch(out=(9999, D), lse=9999, dtype=torch.float32, device=DEVICE):
    return TreeAttentionWorkspace(
        empty(*out, dtype=dtype, device=device), empty(lse, dtype=dtype, device=device)
    )


WORKSPACES = [
    (lambda: scratch(out=(1, D)), ValueError, "too small.*tree_attention_workspace"),
    (lambda: scratch(lse=1), ValueError, r"\(1,\) is too small"),
    (lambda: scratch(out=(9999, D + 8)), ValueError, "too small"),
    (lambda: scratch(dtype=torch.float16), TypeError, r"float32, got torch\.float16"),
    (lambda: scratch(device="meta"), ValueError, r"workspace\.part_out is on meta"),
    (
        lambda: TreeAttentionWorkspace(empty(D, 9999, dtype=torch.float32).T, scratch().part_lse),
        ValueError,
        "contiguous, got strides",
    ),
]


@pytest.mark.parametrize(("make", "error", "message"), WORKSPACES)
def test_workspaces(make, error, message):
    refused(error, message, workspace=make())


@pytest.mark.parametrize("name", ["k_scale", "v_scale", "sm_scale"])
@pytest.mark.parametrize("value", [0.0, -1.0, NAN, INF, -INF, 1e-30, 1e30])
def test_scales_out_of_range(name, value):
    where = {"sm_scale": value} if name == "sm_scale" else {"context": {name: value}}
    refused(ValueError, rf"{name} is in \[.*\], got {re.escape(str(value))};", **where)


@pytest.mark.parametrize("name", ["k_scale", "v_scale", "sm_scale", "logit_cap"])
@pytest.mark.parametrize("value", [torch.ones(()), None, "1"], ids=str)
def test_scales_that_are_no_numbers(name, value):
    """A tensor on the device would have to be read: a wait in the middle of serving."""
    if name == "sm_scale" and value is None:
        return  # the default
    where = {"context": {name: value}} if name in ("k_scale", "v_scale") else {name: value}
    refused(TypeError, f"{name} is a number on the host, got {type(value).__name__}", **where)


@pytest.mark.parametrize("value", [-1.0, NAN, INF, 1001.0])
def test_logit_caps_out_of_range(value):
    refused(ValueError, rf"logit_cap is in \[0, 1000\], 0 for none, got {value}", logit_cap=value)


def test_a_logit_cap_of_next_to_nothing():
    refused(ValueError, "logit_cap is 1e-30: every logit would be 0", logit_cap=1e-30)


def test_windows():
    refused(ValueError, r"window_left is in \[-1, .*got -2", window_left=-2)
    refused(ValueError, r"window_left is in .*got 2147483648", window_left=2**31)
    refused(TypeError, "window_left is an int, got float", window_left=4.0)
    refused(
        ValueError, "window_left=4 needs the tree's depths", window_left=4, tree={"depths": None}
    )
    starts = torch.tensor([0, 3, 5], device=DEVICE)
    refused(ValueError, "needs key_depths", window_left=4, tree={"key_indptr": starts})


def test_page_sizes():
    refused(ValueError, "page_size is at least 1, got 0", context={"page_size": 0})
    refused(ValueError, "page_size is at least 1, got -16", context={"page_size": -16})
    refused(TypeError, "page_size is an int, got float", context={"page_size": 16.0})
    refused(ValueError, "page_size=4 needs lengths", context={"page_size": 4})


INDICES = [
    "indptr",
    "indices",
    "lengths",
    "qo_indptr",
    "key_indptr",
    "slots",
    "depths",
    "key_depths",
]


@pytest.mark.parametrize("name", INDICES)
def test_lists_of_integers(name):
    """Of another dtype, with gaps, of two dimensions, too short, on another device."""
    count = 3 if name == "qo_indptr" else 60  # its length says how many requests there are
    good = torch.arange(2 * count, device=DEVICE)[:count]
    own = {"k": None, "v": None} if name == "slots" else {}

    def given(tensor):
        part = "context" if name in ("indptr", "indices", "lengths") else "tree"
        return {part: {name: tensor, **own}}

    refused(TypeError, rf"{name} is int32 or int64, got torch\.int16", **given(good.short()))
    gaps = torch.arange(2 * count, device=DEVICE)[::2]
    refused(ValueError, rf"{name} is one contiguous.*strides \[2\]", **given(gaps))
    if name != "qo_indptr":
        refused(ValueError, rf"{name} is one contiguous.*got \[1, 60\]", **given(good[None]))
    refused(ValueError, f"{name} is on meta", **given(good.to("meta")))
    if name not in ("indices", "qo_indptr"):
        least = {"indptr": 3, "lengths": 2, "key_indptr": 3}.get(name, 5)
        refused(ValueError, f"{name} is .* at least {least} entries", **given(good[: least - 1]))


def test_offsets_need_no_last_entry_beside_lengths():
    lengths = torch.tensor([20, 5], device=DEVICE)
    refused(
        ValueError, "indptr is .* at least 2 entries",
        context={"lengths": lengths, "indptr": lengths[:1]},
    )  # fmt: skip


def test_masks():
    word = torch.zeros(5, 1, dtype=torch.int32, device=DEVICE)
    refused(TypeError, r"got torch\.bool; pack the bits", tree={"mask": word.bool()})
    refused(ValueError, r"mask is \[5, words\].*got \(4, 1\)", tree={"mask": word[:4]})
    refused(ValueError, r"mask is \[5, words\].*got \(5,\)", tree={"mask": word[:, 0]})
    strided = torch.zeros(5, 4, dtype=torch.int32, device=DEVICE)[:, ::2]
    refused(ValueError, r"with strides \(4, 2\)", tree={"mask": strided})
    refused(ValueError, "mask is on meta", tree={"mask": word.to("meta")})


def test_masks_with_too_few_words_for_the_nodes():
    problem = Problem([20], [chain(40)])
    one = problem.tree.mask[:, :1].contiguous().to(DEVICE)
    message = "mask has 32 bits a node for requests of up to 40 nodes; give 2 int32 words"
    refused(ValueError, message, problem=problem, tree={"mask": one})
    refused(ValueError, "mask has 0 bits", tree={"mask": one[:5, :0]})
    wide = Problem([20], [chain(70)])
    words = torch.zeros(70, 1, dtype=torch.int64, device=DEVICE)
    refused(ValueError, "mask has 64 bits a node", problem=wide, tree={"mask": words})


def test_node_counts():
    refused(ValueError, "q has 5 nodes, but 2 requests of at most 2 nodes", tree={"max_nodes": 2})
    refused(ValueError, "at most 0 nodes", tree={"max_nodes": 0})
    refused(TypeError, "max_nodes is an int, got Tensor", tree={"max_nodes": torch.tensor(3)})
    none = torch.zeros(0, dtype=torch.int32, device=DEVICE)
    refused(ValueError, "qo_indptr is .* at least 1 entries", tree={"qo_indptr": none})


def test_the_tree_s_own_keys():
    k, v = empty(5, 2, D), empty(5, 2, D)
    slots = torch.arange(5, device=DEVICE)
    refused(ValueError, "give one of them", tree={"slots": slots})
    refused(ValueError, "give one of them", tree={"v": None})
    refused(ValueError, "give one of them", tree={"k": None, "v": None})
    refused(TypeError, r"in q's torch.float16, got torch\.float32", tree={"k": k.float()})
    refused(ValueError, r"k \(4, 2, \d+\).*do not match 5 nodes", tree={"k": k[:4], "v": v[:4]})
    refused(ValueError, "do not match", tree={"k": k[:4]})
    refused(ValueError, "do not match", tree={"k": k[:, :1]})
    refused(ValueError, "do not match", tree={"v": v[..., : D // 2]})
    refused(ValueError, "is contiguous, got strides", tree={"k": empty(5, 2, 2 * D)[..., ::2]})
    refused(ValueError, "v is on meta", tree={"v": v.to("meta")})


def test_types_of_queries_and_cache():
    p = Problem([20, 5], [chain(3), chain(2)])
    q, k, v = p.q.to(DEVICE), p.k_cache.to(DEVICE), p.v_cache.to(DEVICE)
    refused(TypeError, r"q is bf16 or fp16, got torch\.float32", problem=p, q=q.float())
    refused(TypeError, r"q is torch\.bfloat16 but the cache is", problem=p, q=q.bfloat16())
    for cache in (torch.float32, torch.float8_e5m2, torch.int8):
        pair = {"k_cache": k.to(cache), "v_cache": v.to(cache)}
        refused(TypeError, f"got {cache}", problem=p, context=pair)
    refused(TypeError, "k_cache and v_cache share", problem=p, context={"v_cache": v.to(FP8)})
    refused(ValueError, "do not fit", problem=p, context={"k_cache": k[:, :1]})
    refused(ValueError, "do not fit", problem=p, q=q[:, :3])
    refused(ValueError, "do not fit", problem=p, q=q[..., : D // 2])
    refused(ValueError, "do not fit", problem=p, q=q[:, :0])
    refused(ValueError, "view a paged cache as slots", problem=p, context={"k_cache": k[None]})
    refused(ValueError, "v_cache is on meta", problem=p, context={"v_cache": v.to("meta")})
    wide = torch.stack([q, q], -1).flatten(-2)[..., ::2]
    refused(ValueError, r"q's last dimension is contiguous, got strides", problem=p, q=wide)


@pytest.mark.parametrize(("dim", "dim_v"), [(8, 64), (64, 8), (320, 64), (64, 512)])
def test_head_dims(dim, dim_v):
    problem = Problem([2], [chain(2)], dim=dim, dim_v=dim_v)
    message = rf"head dims are in \[16, 256\], got {dim} and {dim_v}; pad"
    refused(ValueError, message, problem=problem)
    with pytest.raises(ValueError, match=message):
        tree_attention_workspace(
            AttentionShape(4, 2, dim, dim_v), batch=1, max_nodes=2, device=torch.device(DEVICE)
        )


@pytest.mark.parametrize(("batch", "nodes"), [(0, 3), (2, 0), (-1, 3)])
def test_workspaces_for_nothing(batch, nodes):
    with pytest.raises(ValueError, match=f"at least 1, got {batch} and {nodes}"):
        tree_attention_workspace(
            AttentionShape(4, 2, D, D), batch=batch, max_nodes=nodes, device=torch.device(DEVICE)
        )


@pytest.mark.parametrize("v_scale", [1e-5, 2.0**-16, 2048.0])
def test_scales_that_fp16_weights_cannot_hold(v_scale):
    """Keys beside the cache are weighed with 1 / v_scale in the type of q."""
    problem = Problem([20], [chain(3)], cache_dtype=FP8)
    scale = {"v_scale": v_scale}
    message = rf"got {v_scale}; use bf16, or give the keys as slots of the cache"
    refused(ValueError, message, problem=problem, context=scale)


def test_no_requests():
    p = Problem([20], [chain(3)])
    context, tree = to_device(p.context), to_device(p.tree)
    nothing = replace(
        tree, qo_indptr=tree.qo_indptr[:1], mask=tree.mask[:0], k=tree.k[:0], v=tree.v[:0],
        depths=None,
    )  # fmt: skip
    q = p.q[:0].to(DEVICE)
    out = torch.full_like(q, NAN)
    assert tree_attention(q, context, nothing, out=out) is out
    assert tree_attention(q, context, nothing).shape == (0, 4, D)
    with pytest.raises(ValueError, match="q has 3 nodes, but 0 requests"):
        tree_attention(p.q.to(DEVICE), context, replace(tree, qo_indptr=tree.qo_indptr[:1]))


def test_no_check_reads_a_value_from_the_device(monkeypatch):
    """Inputs that have no values pass every check and get to the launches."""
    p = Problem([20], [chain(3)])
    context, tree = (
        replace(x, **{k: v.to("meta") for k, v in vars(x).items() if isinstance(v, torch.Tensor)})
        for x in (p.context, p.tree)
    )
    launches = MagicMock()  # kernels[grid](arguments)
    monkeypatch.setattr(module, "tree_attention_kernel", launches)
    monkeypatch.setattr(module, "merge_splits_kernel", launches)
    sinks = torch.empty(4, device="meta")
    out = tree_attention(p.q.to("meta"), context, tree, sinks=sinks, window_left=3, config=SMALL)
    assert out.is_meta
    assert launches.__getitem__.call_count == 2
