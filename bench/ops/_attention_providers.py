"""Implementations of tree attention: ours, PyTorch, SGLang's Triton kernels, flashinfer, FA3."""

import importlib
import importlib.util
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.op import Case, Thunk
from bench.ops._attention_inputs import Attention
from bench.providers import needs, needs_gpu, poisoned
from frspec_kernels.tree_attention import tree_attention, tree_attention_workspace
from frspec_kernels.tree_attention_inputs import AttentionShape
from frspec_kernels.tree_attention_launch import TreeAttentionConfig

FLASHINFER_WORKSPACE = 512 << 20
DECODE_SPLITS = 8  # SGLang's default of --triton-attention-num-kv-splits


def ours(inputs: Attention, config: TreeAttentionConfig | None = None) -> Thunk:
    """Our kernels, in the table's configuration or in ``config``."""
    q, context, tree = inputs.q, inputs.context, inputs.tree
    shape = AttentionShape(
        q.shape[1], context.k_cache.shape[1], q.shape[2], context.v_cache.shape[2]
    )
    workspace = tree_attention_workspace(
        shape, batch=tree.batch, max_nodes=tree.max_nodes, device=q.device, config=config
    )
    workspace.part_out.fill_(float("nan"))
    workspace.part_lse.fill_(float("nan"))
    out = torch.full_like(q, float("nan"))
    return lambda: tree_attention(q, context, tree, out=out, workspace=workspace, config=config)


def _uniform(case: Case) -> bool:
    return case["kind"] == "uniform"


def no_torch(case: Case) -> str | None:
    """PyTorch's kernel takes one mask and one length for the batch."""
    if not _uniform(case) or case["dtype"] == "fp8":
        return "gathers equal contexts in the type of q only"
    return needs_gpu(case)


def torch_sdpa(inputs: Attention) -> Thunk:
    """Gather every request's keys, then ``scaled_dot_product_attention`` with a mask."""
    slots = torch.stack(inputs.slots)
    batch, keys = slots.shape
    own = inputs.visible.shape[1]
    mask = torch.ones(inputs.visible.shape[0], keys, dtype=torch.bool, device=slots.device)
    mask[:, keys - own :] = inputs.visible
    q = inputs.q.view(batch, -1, *inputs.q.shape[1:]).transpose(1, 2)
    context = inputs.context

    def call() -> Tensor:
        k, v = (t[slots].transpose(1, 2) for t in (context.k_cache, context.v_cache))
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        return out.transpose(1, 2).reshape(inputs.q.shape)

    return call


def _full_mask(inputs: Attention) -> tuple[Tensor, Tensor]:
    """A byte a (node, key) of all requests, and where each request's rows start."""
    rows, device = inputs.visible.shape[0], inputs.q.device
    parts = []
    for length in inputs.contexts:
        seen = torch.ones(rows, length, dtype=torch.bool, device=device)
        parts.append(torch.cat([seen, inputs.visible], 1).flatten())
    sizes = torch.tensor([0, *(len(part) for part in parts)], device=device)
    return torch.cat(parts), sizes.cumsum(0)


def _starts(lists: list[Tensor], device: torch.device) -> Tensor:
    return torch.tensor([0, *map(len, lists)], device=device).cumsum(0).int()


@cache
def _sglang(name: str) -> Any:
    """SGLang's attention kernels moved between releases."""
    for package in ("sglang.kernels.ops.attention", "sglang.srt.layers.attention.triton_ops"):
        if importlib.util.find_spec(package) is not None:
            return importlib.import_module(f"{package}.{name}")
    raise ImportError(f"this SGLang has no {name}")


def sglang_extend(inputs: Attention) -> Thunk:
    """SGLang's Triton kernel for verification."""
    function = _sglang("extend_attention").extend_attention_fwd
    context, tree = inputs.context, inputs.tree
    mask, mask_indptr = _full_mask(inputs)
    own = inputs.visible.shape[1]
    prefixes = [slots[:-own] for slots in inputs.slots]
    indptr, indices = _starts(prefixes, inputs.q.device), torch.cat(prefixes)
    out = torch.full_like(inputs.q, float("nan"))

    def call() -> Tensor:
        function(
            inputs.q, tree.k, tree.v, out, context.k_cache, context.v_cache, tree.qo_indptr,
            indptr, indices, mask, True, mask_indptr, tree.max_nodes, 1.0, 1.0,
            sm_scale=inputs.q.shape[2] ** -0.5,
        )  # fmt: skip
        return out

    return call


def no_sglang_extend(case: Case) -> str | None:
    """The tree's keys are given in the type of q."""
    return "needs the cache in q's type" if case["dtype"] == "fp8" else needs("sglang")(case)


@cache
def _flashinfer_workspace() -> Tensor:
    return torch.empty(FLASHINFER_WORKSPACE, dtype=torch.uint8, device="cuda")


def flashinfer_prefill(inputs: Attention) -> Thunk:
    """flashinfer's paged prefill (fa2) with a custom mask over context and tree, page size 1."""
    prefill = importlib.import_module("flashinfer").BatchPrefillWithPagedKVCacheWrapper
    wrapper = prefill(_flashinfer_workspace(), "NHD", backend="fa2")
    lists, device = inputs.slots, inputs.q.device
    ones = torch.ones(len(lists), dtype=torch.int32, device=device)
    q, context = inputs.q, inputs.context
    wrapper.plan(
        inputs.tree.qo_indptr, _starts(lists, device), torch.cat(lists).int(), ones,
        q.shape[1], context.k_cache.shape[1], q.shape[2], 1, custom_mask=_full_mask(inputs)[0],
        q_data_type=q.dtype, kv_data_type=context.k_cache.dtype, sm_scale=q.shape[2] ** -0.5,
    )  # fmt: skip
    pages = context.k_cache.unsqueeze(1), context.v_cache.unsqueeze(1)
    out = torch.full_like(q, float("nan"))

    def call() -> Tensor:
        wrapper.run(q, pages, out=out)
        return out

    return call


def no_flashinfer(case: Case) -> str | None:
    """An fp8 cache is another module to compile for minutes."""
    return "compiled for bf16 only" if case["dtype"] == "fp8" else needs("flashinfer")(case)


@cache
def _fa3_missing() -> str | None:
    try:
        importlib.import_module("sgl_kernel.flash_attn")
        importlib.import_module("sgl_kernel.flash_ops")
    except (ImportError, OSError) as error:
        return f"FlashAttention-3 is not installed: {error}"
    return None


def no_fa3(case: Case) -> str | None:
    """FA3's cascade as SGLang runs it: bf16, page size 1 for the tree."""
    if case["dtype"] == "fp8" or int(case.params.get("page", 1)) > 1:
        return "compared at bf16 and page size 1"
    return needs("sgl_kernel")(case) or _fa3_missing()


def _padded(lists: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Lists as rows of one int32 table, and their lengths."""
    table = torch.nn.utils.rnn.pad_sequence(lists, batch_first=True).int()
    return table, torch.tensor(list(map(len, lists)), dtype=torch.int32, device=table.device)


def fa3_cascade(inputs: Attention) -> Thunk:
    """SGLang's verification on FA3: all nodes over the context, each over its path, a merge."""
    attend = importlib.import_module("sgl_kernel.flash_attn").flash_attn_with_kvcache
    merge = importlib.import_module("sgl_kernel").merge_state_v2
    own, nodes = inputs.visible.shape[1], inputs.tree.max_nodes
    prefixes, prefix_lens = _padded([slots[:-own] for slots in inputs.slots])
    paths, path_lens = _padded([row[seen] for row in inputs.tree_slots for seen in inputs.visible])
    device, q = inputs.q.device, inputs.q
    each = torch.arange(len(q) + 1, dtype=torch.int32, device=device)
    pages = inputs.context.k_cache.unsqueeze(1), inputs.context.v_cache.unsqueeze(1)
    common: dict[str, Any] = {
        "softmax_scale": q.shape[2] ** -0.5, "causal": False, "return_softmax_lse": True,
        "num_splits": 0,
    }  # fmt: skip

    def call() -> Tensor:
        out, lse, *_ = attend(
            q, *pages, page_table=prefixes, cache_seqlens=prefix_lens,
            cu_seqlens_q=inputs.tree.qo_indptr, max_seqlen_q=nodes, **common,
        )  # fmt: skip
        own_out, own_lse, *_ = attend(
            q, *pages, page_table=paths, cache_seqlens=path_lens, cu_seqlens_q=each,
            max_seqlen_q=1, **common,
        )  # fmt: skip
        return merge(out, lse.T.contiguous(), own_out, own_lse.T.contiguous())[0]

    return call


def sglang_decode(inputs: Attention) -> Thunk:
    """SGLang's Triton decode kernel, one list of slots for each branch."""
    module, splitter = _sglang("decode_attention"), _sglang("metadata")
    own, q, context = inputs.visible.shape[1], inputs.q, inputs.context
    lists = []
    for slots, row in zip(inputs.slots, inputs.tree_slots, strict=True):
        lists += [torch.cat([slots[:-own], row[seen]]) for seen in inputs.visible]
    indptr, indices = _starts(lists, q.device), torch.cat(lists)
    count, heads = q.shape[0], q.shape[1]
    logits = poisoned(count, heads, DECODE_SPLITS, q.shape[2], dtype=torch.float32, device=q.device)
    lse = poisoned(count, heads, DECODE_SPLITS, dtype=torch.float32, device=q.device)
    splits = torch.ones(count, dtype=torch.int32, device=q.device)
    splitter.get_num_kv_splits_triton[(1,)](
        splits, indptr.diff(), count, 1, heads, context.k_cache.shape[1], DECODE_SPLITS,
        torch.cuda.get_device_properties(q.device).multi_processor_count,
        MAX_NUM_SEQ=max(32, 1 << (count - 1).bit_length()),
    )  # fmt: skip
    out = torch.full_like(q, float("nan"))

    def call() -> Tensor:
        module.decode_attention_fwd(
            q, context.k_cache, context.v_cache, out, indptr, indices, logits, lse, splits,
            DECODE_SPLITS, q.shape[2] ** -0.5, context.k_scale, context.v_scale,
        )  # fmt: skip
        return out

    return call
