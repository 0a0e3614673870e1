# ruff: noqa: TID251 (these run where SGLang is)
"""A small server's objects as the attention backends read them, and the oracle in PyTorch."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.runtime_context import get_context, get_parallel
from transformers import LlamaConfig

from bench.checks import no_worse_than_torch
from frspec_kernels.draft_attention import pack_mask
from tests.kernels.attention_problem import CUDA, DEVICE, chain, closure, random_tree, star

Q_HEADS, KV_HEADS, DIM = 4, 2, 64 if CUDA else 16
DTYPE = torch.bfloat16 if CUDA else torch.float16
NODES, STEPS, TOP_K = 6, 3, 2
MAX_CONTEXT = 96


@pytest.fixture(scope="session", autouse=True)
def configuration():
    """The configuration that SGLang's backends read, as a server publishes it."""
    options = {
        "speculative_num_draft_tokens": NODES,
        "speculative_num_steps": STEPS,
        "speculative_eagle_topk": TOP_K,
    }
    with (
        get_context().override_server_args(device=DEVICE, page_size=1, **options),
        get_parallel().override(attn_tp_size=1, attn_dcp_size=1, attn_dcp_rank=0),
    ):
        yield


class RequestPool:
    """SGLang's table of slots."""

    def __init__(self, requests: int, width: int) -> None:
        self.size = requests
        self.req_to_token = torch.zeros(requests + 1, width, dtype=torch.int32, device=DEVICE)


class Server:
    """Requests with contexts of these lengths in a cache whose other slots are NaN."""

    def __init__(self, contexts: list[int], *, page: int = 1, window: int | None = None, **cache):
        self.batch = len(contexts)
        pages = -(-MAX_CONTEXT // page)
        self.pool = RequestPool(self.batch + 2, MAX_CONTEXT)
        free = torch.randperm((self.batch + 2) * pages + 3)[: (self.batch + 2) * pages] + 1
        slots = (free.view(-1, pages, 1) * page + torch.arange(page)).flatten(1)[:, :MAX_CONTEXT]
        self.pool.req_to_token[1:] = slots.to(DEVICE)
        size = (free.numel() + 4) * page
        self.cache_dtype = cache.get("dtype", DTYPE)
        self.cache = MHATokenToKVPool(
            size=size, page_size=page, dtype=self.cache_dtype, head_num=KV_HEADS, head_dim=DIM,
            layer_num=1, device=DEVICE, enable_memory_saver=False,
        )  # fmt: skip
        self.window = window
        self.move_to(contexts)

    def move_to(self, contexts: list[int]) -> None:
        """Other contexts of other requests; what was in the cache is gone."""
        self.contexts = torch.tensor(contexts, device=DEVICE)
        self.rows = torch.randperm(self.batch + 2)[: self.batch].to(DEVICE) + 1
        for buffer in (self.cache.get_key_buffer(0), self.cache.get_value_buffer(0)):
            buffer.fill_(float("nan"))
            for row, length in zip(self.rows, contexts, strict=True):
                listed = self.pool.req_to_token[row, :length].long()
                buffer[listed] = torch.randn(length, KV_HEADS, DIM, device=DEVICE).to(buffer.dtype)

    def runner(self, *, draft: bool = False) -> Any:
        """What the backends read of SGLang's model runner."""
        config = SimpleNamespace(
            attention_arch=None, context_len=MAX_CONTEXT, dtype=DTYPE, head_dim=DIM,
            hf_config=LlamaConfig(), is_encoder_decoder=False, swa_v_head_dim=DIM, v_head_dim=DIM,
            linear_attn_registry_result=None,
            get_max_num_attention_heads=lambda: Q_HEADS, get_num_kv_heads=lambda *_: KV_HEADS,
        )  # fmt: skip
        return SimpleNamespace(
            req_to_token_pool=self.pool, token_to_kv_pool=self.cache,
            page_size=self.cache.page_size,
            sliding_window_size=self.window, token_to_kv_pool_allocator=None, model_config=config,
            device=DEVICE, gpu_id=0, is_draft_worker=draft, kv_cache_dtype=self.cache_dtype,
            kv_index_translator=Translator(self.pool), decode_num_tokens_per_req=lambda: NODES,
            server_args=get_context().server_args,
        )  # fmt: skip

    def layer(self, *, window: int = -1, **options) -> RadixAttention:
        return RadixAttention(
            Q_HEADS, DIM, options.pop("scaling", DIM**-0.5), KV_HEADS, 0,
            sliding_window_size=window, **options,
        )  # fmt: skip

    def tokens(self, count: int) -> list[torch.Tensor]:
        """Random q, k and v of ``count`` tokens, as slices of one projection: rows far apart."""
        widths = [Q_HEADS * DIM, KV_HEADS * DIM, KV_HEADS * DIM]
        return list(torch.randn(count, sum(widths), device=DEVICE).to(DTYPE).split(widths, 1))

    def batch_of(self, mode: ForwardMode, per_request: int, **fields) -> Any:
        """A forward batch that writes its tokens right after the contexts."""
        places = self.contexts[:, None] + torch.arange(per_request, device=DEVICE)
        slots = self.pool.req_to_token[self.rows[:, None], places].long().flatten()
        batch = {
            "forward_mode": mode, "batch_size": self.batch, "req_pool_indices": self.rows,
            "seq_lens": self.contexts, "seq_lens_sum": None, "seq_lens_cpu": None,
            "out_cache_loc": slots,
            "positions": places.flatten(), "spec_info": None, "encoder_lens": None,
            "kv_loc_plan": None,
            "kv_loc_cols": None, "extend_seq_lens_cpu": None, "out_cache_loc_is_physical": True,
            "actual_forward_mode": mode, "input_ids": None, "mha_one_shot": False,
        }  # fmt: skip
        return SimpleNamespace(**(batch | fields))


class Translator:
    """SGLang's reader of slots (0.5.23), for a pool that translates nothing."""

    def __init__(self, pool: RequestPool) -> None:
        self.pool = pool

    window_kv_kind = None

    def pack_read_stream(
        self, plan, *, req_pool_indices, seq_lens, indptr, out, kv_start_idx=None, **_
    ) -> bool:
        for b, row in enumerate(req_pool_indices.tolist()):
            start = 0 if kv_start_idx is None else int(kv_start_idx[b])
            listed = self.pool.req_to_token[row, start : start + int(seq_lens[b])]
            out[int(indptr[b]) :][: listed.numel()] = listed
        return False

    def read_source(self, plan, *, req_pool_indices, bs, **_) -> Any:
        table = self.pool.req_to_token
        return SimpleNamespace(
            row_ids=req_pool_indices, ids=table, row_stride=table.stride(0), entry_page_size=1,
            v2p=None, is_translated=False,
        )  # fmt: skip


def dense(server, q, k, v, visible, *, scaling=DIM**-0.5, cap=0.0, window=-1, sinks=None):
    """PyTorch over each token's own list: in the type of q and in fp64.

    ``visible[t]`` is (request, rows of k and v that it sees, their depths, its own depth).
    """
    group = Q_HEADS // KV_HEADS
    results: dict = {DTYPE: [], torch.float64: []}
    q = q.reshape(-1, Q_HEADS, DIM)
    k, v = k.reshape(-1, KV_HEADS, DIM), v.reshape(-1, KV_HEADS, DIM)
    for token, (request, rows, depths, depth) in enumerate(visible):
        length = int(server.contexts[request])
        slots = server.pool.req_to_token[server.rows[request], :length].long()
        distance = torch.cat(
            [length - torch.arange(length) + depth, depth - torch.tensor(depths).long()]
        ).to(DEVICE)
        seen = distance <= window if window >= 0 else distance >= 0
        for dtype, found in results.items():
            keys = torch.cat([server.cache.get_key_buffer(0)[slots].to(dtype), k[rows].to(dtype)])
            values = torch.cat(
                [server.cache.get_value_buffer(0)[slots].to(dtype), v[rows].to(dtype)]
            )
            keys = keys[seen].repeat_interleave(group, 1)
            values = values[seen].repeat_interleave(group, 1)
            wide = torch.promote_types(dtype, torch.float32)
            scores = torch.einsum("hd,nhd->hn", q[token].to(dtype), keys).to(wide) * scaling
            if cap:
                scores = cap * torch.tanh(scores / cap)
            total = torch.logsumexp(scores, 1, keepdim=True)
            if sinks is not None:
                total = torch.logaddexp(total, sinks.to(wide)[:, None])
            found.append(torch.einsum("hn,nhd->hd", torch.exp(scores - total).to(dtype), values))
    return [torch.stack(rows).flatten(1) for rows in results.values()]


def random_trees(batch: int) -> list[list[int]]:
    shapes = [random_tree, star, chain, random_tree]
    return [shapes[b % len(shapes)](NODES) for b in range(batch)]


def verify_problem(server, trees):
    """Each node's visible rows and depths, and the masks as booleans ``[B, N, N]``."""
    seen, depths = zip(*(closure(tree, NODES) for tree in trees), strict=True)
    visible = []
    for b in range(server.batch):
        for node in range(NODES):
            own = seen[b][node].nonzero().flatten()
            visible.append(
                (b, (b * NODES + own).to(DEVICE), depths[b][own].tolist(), int(depths[b][node]))
            )
    return visible, torch.stack(seen).to(DEVICE), torch.stack(depths).to(DEVICE)


def verify_batch(server, seen, depths, kind: str) -> Any:
    flat = seen.view(-1, NODES)
    mask = pack_mask(flat) if kind == "bits" else seen.flatten()
    batch = server.batch_of(ForwardMode.TARGET_VERIFY, NODES)
    batch.positions = (server.contexts[:, None] + depths).flatten()
    batch.spec_info = SimpleNamespace(
        custom_mask=mask, draft_token_num=NODES, num_tokens_per_req=NODES
    )
    return batch


def extend_problem(server, width):
    return [
        (b, torch.arange(node + 1, device=DEVICE) + b * width, list(range(node + 1)), node)
        for b in range(server.batch)
        for node in range(width)
    ]


def draft_batch(server) -> Any:
    """A draft round: each branch has STEPS slots of its own, branch after branch."""
    batch = server.batch_of(ForwardMode.DECODE, TOP_K * STEPS)
    batch.positions = server.contexts.repeat_interleave(TOP_K)
    batch.spec_info = SimpleNamespace(
        kv_indptr=None, kv_indices=None, window_kv_indptr=None, window_kv_indices=None
    )
    return batch


def run_draft(server, backend, batch, tokens):
    """Every step's output; the step's slots are bound as SGLang's draft worker binds them."""
    slots = batch.out_cache_loc.view(server.batch, TOP_K, STEPS)
    outs = []
    for step, (q, k, v) in enumerate(tokens):
        batch.out_cache_loc = slots[..., step].flatten()
        outs.append(backend.attn_backends[step].forward_decode(q, k, v, server.layer(), batch))
    batch.out_cache_loc = slots.flatten()
    return outs


def check_draft(server, outs, tokens):
    branches = server.batch * TOP_K
    for step, out in enumerate(outs):
        k = torch.cat([t[1] for t in tokens[: step + 1]])
        v = torch.cat([t[2] for t in tokens[: step + 1]])
        own = torch.arange(step + 1, device=DEVICE) * branches
        visible = [(r // TOP_K, own + r, list(range(step + 1)), step) for r in range(branches)]
        same, truth = dense(server, tokens[step][0], k, v, visible)
        verdict = no_worse_than_torch(out, same, truth)
        assert verdict.ok, (step, verdict.why)


def verdict_of(out, server, tokens, visible, **options):
    q, k, v = tokens
    same, truth = dense(server, q, k, v, visible, **options)
    return no_worse_than_torch(out[: same.shape[0]], same, truth)
