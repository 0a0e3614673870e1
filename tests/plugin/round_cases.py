# ruff: noqa: TID251 (these run where SGLang is)
"""Head, tree growth, verification and round memory on the CPU; ``test_round.py`` runs this file."""

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from prometheus_client import generate_latest
from sglang.srt.layers.attention.triton_backend import TritonAttnBackend
from sglang.srt.layers.layernorm import Gemma3RMSNorm, GemmaRMSNorm, RMSNorm
from sglang.srt.layers.logits_processor import LogitsProcessor
from sglang.srt.layers.quantization.unquant import UnquantizedEmbeddingMethod
from sglang.srt.layers.vocab_parallel_embedding import VocabParallelEmbedding
from sglang.srt.mem_cache import memory_pool
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.model_executor.graph_shared_output import GraphSharedOutput

from frspec_kernels import tree_args
from frspec_kernels.norm import rms_norm_reference
from frspec_kernels.tree import Accepted, TreeShape, empty_accepted
from frspec_kernels.tree_reference import accept_greedy_reference
from sgl_frspec import algorithm, norms
from sgl_frspec.draft_head import DraftHead, reduced_topk_cpu, without_logits
from sgl_frspec.draft_tree import KernelGrowth, StockGrowth
from sgl_frspec.embedding import install_lookups
from sgl_frspec.map_fit import Counters, MapFit, prometheus_counters
from sgl_frspec.norms import install_norms, is_plain, models_on_our_norms, takes
from sgl_frspec.options import ENVIRONMENT_VARIABLE, OptionError, Options
from sgl_frspec.refusals import refuse_rounding_by_batch
from sgl_frspec.round_conditions import copies_contexts_first, obstacle
from sgl_frspec.round_graph import path_rows
from sgl_frspec.round_state import RoundBatches, RoundInputs
from sgl_frspec.slot_copies import limit_copies
from sgl_frspec.target_logits import unconverted_logits
from sgl_frspec.verify import is_plain_greedy, rows_at_front, tokens_at_front
from sgl_frspec.verify_input import TreeBuilder, unpack_mask

H, K, S, N = 8, 3, 3, 10
SHAPE = TreeShape(K, S, N)
CPU = torch.device("cpu")


def head(**stock: Any) -> tuple[DraftHead, torch.Tensor]:
    g = torch.Generator().manual_seed(1)
    ids = torch.tensor([2, 3, 5, 7, 11, 13, 17, 19])
    return DraftHead(K, K, ids, SimpleNamespace(**stock)), torch.randn(8, H, generator=g)


def run_head(module: DraftHead, weight: torch.Tensor, hidden: torch.Tensor, batch: Any) -> Any:
    return module(None, hidden, SimpleNamespace(weight=weight), batch)


def expected(hidden: torch.Tensor, weight: torch.Tensor, ids: torch.Tensor) -> tuple[Any, Any]:
    probs = (hidden.double() @ weight.double().T).softmax(-1)
    best = probs.topk(K)
    return best.values.float(), ids[best.indices]


def test_head_proposes_for_the_rows_that_each_phase_needs():
    module, weight = head()
    hidden = torch.randn(10, H, generator=torch.Generator().manual_seed(2))
    phases = {
        "draft": (SimpleNamespace(forward_mode=ForwardMode.DECODE), list(range(10))),
        "prompts": (
            SimpleNamespace(
                forward_mode=ForwardMode.EXTEND, extend_seq_lens=torch.tensor([4, 1, 5])
            ),
            [3, 4, 9],
        ),
        "accepted": (
            SimpleNamespace(
                forward_mode=ForwardMode.DRAFT_EXTEND_V2,
                input_ids=torch.zeros(10),
                spec_info=SimpleNamespace(num_accept_tokens=torch.tensor([1, 4])),
            ),
            [0, 8],
        ),
    }
    for batch, rows in phases.values():
        output = run_head(module, weight, hidden, batch)
        probs, ids = expected(hidden[rows], weight, module.token_ids)
        torch.testing.assert_close(module.last().probs, probs)
        assert torch.equal(module.last().token_ids, ids)
        assert torch.equal(output.hidden_states, hidden[rows])
    assert torch.equal(module.after_verification(2).token_ids, module.last().token_ids)


def test_head_orders_equal_scores_by_the_smaller_id():
    found = reduced_topk_cpu(torch.zeros(1, H), torch.ones(8, H), K, torch.arange(10, 18))
    assert found.token_ids.tolist() == [[10, 11, 12]]
    torch.testing.assert_close(found.probs, torch.full((1, K), 1 / 8))


@pytest.mark.parametrize("name", ["logit_scale", "final_logit_softcapping"])
def test_head_refuses_what_it_would_leave_out(name):
    head(**{name: None})
    with pytest.raises(OptionError, match=f"{name}.*--frspec-stock head"):
        head(**{name: 30.0})


def test_graphs_of_the_draft_bring_no_logits_buffer():
    """SGLang's own class would give ``rows`` x ``vocab_size`` and keep them."""
    shared = GraphSharedOutput(device=torch.device("cpu"), max_rows=64)
    runner = SimpleNamespace(graph_shared_output=shared, device="cpu")
    with without_logits(runner):
        assert runner.graph_shared_output.get_logits_buffer(500, rows=48).shape == (48, 1)
    assert runner.graph_shared_output is shared
    assert not vars(shared)["_logits_buffers"]
    with pytest.raises(RuntimeError, match="capture"), without_logits(runner):
        raise RuntimeError("capture failed")
    assert runner.graph_shared_output is shared


def test_our_growth_and_sglangs_choose_the_same_trees():
    g = torch.Generator().manual_seed(3)
    batch = 4
    ours, stock = KernelGrowth(SHAPE, batch, CPU), StockGrowth(SHAPE)
    for step in range(S):
        rows = batch if step == 0 else batch * K
        probs = torch.rand(rows, 16, generator=g).softmax(-1).topk(K).values
        tokens = torch.stack([torch.randperm(500, generator=g)[:K] for _ in range(rows)])
        hidden = torch.randn(rows, H, generator=g)
        one, other = (growth.grow(step, probs, tokens, hidden) for growth in (ours, stock))
        if one is None or other is None:
            assert one is other is None
            assert step == S - 1
            continue
        assert torch.equal(one.tokens, other.tokens)
        assert one.hidden is not None
        assert other.hidden is not None
        assert torch.equal(one.hidden, other.hidden)
    scores, tokens, parents = ours.finish()
    stock_parents, selected, stock_tokens = stock.finish()
    assert torch.equal(parents, stock_parents)
    best = scores.topk(N - 1).indices.sort().values
    assert torch.equal(best, selected)
    assert torch.equal(tokens.gather(1, best), stock_tokens)


def grown(batch: int) -> Any:
    g = torch.Generator().manual_seed(4)
    growth = KernelGrowth(SHAPE, batch, CPU)
    for step in range(S):
        rows = batch if step == 0 else batch * K
        probs = torch.rand(rows, 16, generator=g).softmax(-1).topk(K).values
        tokens = torch.stack([torch.randperm(500, generator=g)[:K] for _ in range(rows)])
        growth.grow(step, probs, tokens, torch.zeros(rows, H))
    return growth.candidates


def test_builder_describes_the_tree_to_sglang():
    lens, roots = torch.tensor([5, 0]), torch.tensor([600, 601])
    batch = SimpleNamespace(seq_lens=lens, seq_lens_sum=5)
    backend = SimpleNamespace(verify_mask=None, max_context_len=100)
    found = TreeBuilder(SHAPE).build(grown(2), roots, batch, backend)
    sees = unpack_mask(found.tree.mask, N).view(2, N, N)
    assert torch.equal(found.custom_mask[: 2 * N * N].view(2, N, N), sees)
    assert found.draft_token.view(2, N)[:, 0].tolist() == [600, 601]
    depths = found.tree.depths.view(2, N)
    assert torch.equal(found.positions.view(2, N), lens[:, None] + depths)
    assert torch.equal(sees.sum(-1), depths + 1)
    assert (found.draft_token_num, found.topk, found.spec_steps) == (N, K, S)


def test_builder_writes_the_mask_where_the_backends_graphs_read_it():
    words = torch.full((40, 1), -7, dtype=torch.int32)
    backend = SimpleNamespace(mask_words=words)
    builder = TreeBuilder(SHAPE)
    found = builder.allocate(torch.tensor([5, 0]), None, backend)
    builder.fill(found, grown(2), torch.tensor([1, 2]), torch.tensor([5, 0]), backend)
    assert found.tree.mask.data_ptr() == words.data_ptr()
    assert (words[: 2 * N] != -7).all()
    assert (words[2 * N :] == -7).all()
    assert builder.allocate(torch.zeros(5, dtype=torch.int64), None, backend).tree.mask.shape[
        0
    ] == (5 * N)


def accepted() -> tuple[Accepted, torch.Tensor]:
    """One request that accepts nodes 0, 2, 5 of 6, and one that accepts its root alone."""
    tokens = torch.tensor([[9, 1, 2, 3, 4, 5], [9, 1, 2, 3, 4, 5]])
    parents = torch.tensor([[-1, 0, 0, 1, 2, 2], [-1, 0, 0, 1, 2, 2]], dtype=torch.int32)
    target = torch.tensor([[2, 0, 5, 0, 0, 77], [40, 0, 0, 0, 0, 0]])
    slots = torch.arange(100, 112)
    return accept_greedy_reference(
        tokens, parents, target, torch.tensor([3, 8]), 4, slots
    ), torch.arange(12)


def test_accepted_path_comes_to_the_front():
    found, rows = accepted()
    assert tokens_at_front(found, 6).tolist() == [2, 5, 77, 0, 0, 0, 40, 0, 0, 0, 0, 0]
    assert rows_at_front(rows, found, 6).tolist() == [0, 2, 5, 3, 4, 5, 6, 7, 8, 9, 10, 11]
    assert path_rows(found, 6, 4).tolist() == [0, 2, 5, 3, 6, 7, 8, 9]
    assert path_rows(found, 6, 6).tolist() == [0, 2, 5, 3, 4, 5, 6, 7, 8, 9, 10, 11]
    assert found.new_seq_lens.tolist() == [6, 9]


def test_tree_shallower_than_its_longest_path():
    found = empty_accepted(1, 2, 4, CPU, slots=True)
    found.path_tokens.copy_(torch.tensor([[7, 8, 0, 0]]))
    found.accept_index.copy_(torch.tensor([[0, 1, -1, -1]]))
    assert tokens_at_front(found, 2).tolist() == [7, 8]
    assert rows_at_front(torch.arange(2), found, 2).tolist() == [0, 1]


def test_only_plain_greedy_batches_take_our_acceptance():
    plain = {
        "is_all_greedy": True,
        "acc_additive_penalties": None,
        "acc_scaling_penalties": None,
        "logit_bias": None,
    }
    flags = {"has_grammar": False, "return_logprob": False, "return_hidden_states": False}

    def batch(**changes: Any) -> Any:
        sampling = {name: changes.get(name, value) for name, value in plain.items()}
        rest = {name: changes.get(name, value) for name, value in flags.items()}
        return SimpleNamespace(sampling_info=SimpleNamespace(**sampling), **rest)

    assert is_plain_greedy(batch())
    assert not is_plain_greedy(batch(is_all_greedy=False))
    for name in [*plain, *flags]:
        if name != "is_all_greedy":
            assert not is_plain_greedy(batch(**{name: torch.ones(1)})), name


def filled(requests: int, padded: int) -> RoundInputs:
    inputs = RoundInputs(4, K, H, torch.float32, CPU)
    for tensor in vars(inputs).values():
        tensor.fill_(3)  # what an earlier round left
    batch = SimpleNamespace(
        seq_lens=torch.tensor([20, 9][:requests]), req_pool_indices=torch.tensor([2, 1][:requests])
    )
    draft_input = SimpleNamespace(
        bonus_tokens=torch.tensor([50, 51][:requests], dtype=torch.int32),
        topk_index=torch.arange(6).view(2, K)[:requests],
        topk_p=torch.rand(2, K)[:requests],
        hidden_states=torch.rand(2, H)[:requests],
    )
    inputs.fill(batch, draft_input, padded, 1)
    assert torch.equal(inputs.probs[:requests], draft_input.topk_p)
    assert torch.equal(inputs.hidden[:requests], draft_input.hidden_states)
    assert torch.equal(inputs.token_ids[:requests], draft_input.topk_index)
    return inputs


def test_padding_requests_own_no_slots():
    inputs = filled(2, 4)
    assert inputs.seq_lens.tolist() == [20, 9, 1, 1]
    assert inputs.rows.tolist() == [2, 1, 0, 0]
    assert inputs.bonus_tokens.tolist()[:2] == [50, 51]


@pytest.mark.parametrize("width", [S + 1, N])
def test_every_phase_writes_behind_the_context(width):
    table = torch.arange(3 * 64, dtype=torch.int32).view(3, 64)
    batches = RoundBatches(filled(2, 2), 2, SHAPE, width, None)
    batches.locate(table)
    starts = torch.tensor([2 * 64 + 20, 1 * 64 + 9])[:, None]
    for slots, count in (
        (batches.draft_slots, K * S),
        (batches.node_slots, N),
        (batches.extend_slots, width),
    ):
        assert torch.equal(slots.view(2, count), starts + torch.arange(count))
    assert batches.draft_positions.tolist() == [20] * K + [9] * K
    assert batches.extend_positions.view(2, width)[:, 0].tolist() == [20, 9]
    assert batches.extend_positions.view(2, width)[:, -1].tolist() == [
        20 + width - 1,
        9 + width - 1,
    ]
    extend = batches.extend()
    assert extend.extend_seq_lens_cpu == [width, width]
    assert extend.out_cache_loc is batches.extend_slots


def test_norms_that_ours_replaces():
    assert is_plain(RMSNorm(16))
    assert not is_plain(RMSNorm(16, var_hidden_size=8))
    assert not is_plain(RMSNorm(16, cast_x_before_out_mul=True))
    assert not is_plain(RMSNorm(32_768))
    assert not isinstance(GemmaRMSNorm(16), RMSNorm)
    assert not takes(torch.ones(2, 16, dtype=torch.bfloat16), None, ())


def heads_of(tokens: int, heads: int, width: int, dims: int) -> torch.Tensor:
    """Queries as Gemma 3's layers hand them over: a part of a wider row, of each token."""
    torch.manual_seed(tokens)
    row = torch.randn(tokens, (heads + 2) * width, dtype=torch.bfloat16)
    x = row[:, : heads * width].unflatten(-1, (heads, width))
    return x if dims == 3 else x.transpose(0, 1).unsqueeze(0)


@pytest.mark.parametrize("dims", [3, 4])
@pytest.mark.parametrize(("tokens", "heads"), [(16, 4), (5, 1), (1, 4)])
def test_gemma_3s_heads_are_normalised_as_by_sglang(monkeypatch, dims, tokens, heads):
    """Equal to the last bit, and as it lies in memory, which SGLang's attention relies on."""
    calls = []

    def kernel(x, weight, eps, *, gemma):
        assert x.dim() == 2
        assert x.stride(1) == 1
        calls.append(x.shape)
        return rms_norm_reference(x, weight, eps, gemma=gemma)

    monkeypatch.setattr(norms, "rms_norm", kernel)
    monkeypatch.setattr(norms, "takes_heads", lambda x, residual: residual is None and x.dim() > 2)
    norm = Gemma3RMSNorm(32, eps=1e-6)
    norm.weight.data = torch.randn(32).bfloat16()
    x = heads_of(tokens, heads, 32, dims)
    expected: Any = norm.forward_native(x)
    assert install_norms(torch.nn.ModuleList([norm])) == 1
    found = norm(x)
    assert calls == [(tokens * heads, 32)]
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, expected)
    steps = zip(found.shape, found.stride(), expected.stride(), strict=True)
    assert all(ours == theirs for size, ours, theirs in steps if size > 1)
    # Rows without heads, and with a residual, stay SGLang's.
    rows, residual = torch.randn(3, 32).bfloat16(), torch.randn(3, 32).bfloat16()
    alone: Any = norm.forward_native(rows)
    assert torch.equal(norm(rows), alone)
    wanted = norm.forward_native(rows.clone(), residual.clone())
    assert all(torch.equal(a, b) for a, b in zip(norm(rows, residual), wanted, strict=True))
    assert len(calls) == 1


def test_heads_that_the_kernel_takes():
    x = heads_of(4, 2, 32, 3)
    assert not norms.takes_heads(x, None)  # not on a GPU
    on_gpu = SimpleNamespace(is_cuda=True, dim=lambda: 3, numel=lambda: 1, stride=lambda i: 1)
    on_gpu.shape, on_gpu.dtype = (1, 1, 32), torch.bfloat16
    gpu: Any = on_gpu
    assert norms.takes_heads(gpu, None)
    assert not norms.takes_heads(gpu, x)
    for name, value in (
        ("dim", lambda: 2),
        ("numel", lambda: 0),
        ("stride", lambda i: 2),
        ("shape", (1, 1, 32_768)),
        ("dtype", torch.float32),
    ):
        other: Any = SimpleNamespace(**{**vars(on_gpu), name: value})
        assert not norms.takes_heads(other, None), name


@pytest.mark.parametrize(("requests", "launches"), [(16, 1), (17, 2), (64, 7)])
def test_accepted_paths_are_copied_in_launches_that_fit(monkeypatch, requests, launches):
    """SGLang's own splitting, with paths that cross its limits; each launch works in place."""
    pool: Any = object.__new__(MHATokenToKVPool)
    slots, depth = 8 * requests, 7 if requests == 64 else 4
    cache = torch.randn(slots, 3)
    pool.k_scale_buffer = pool.native_k_scale_buffer = pool.data_ptrs = pool.data_strides = None
    pool.use_native_move_kv_cache = False
    pool._kv_copy_config = {"num_locs_upper": 256, "bytes_per_tile": 128}
    limit_copies(pool)
    sizes = []

    def copy(ptrs, strides, target, source, count, upper, config):
        sizes.append((count, upper))
        assert count == target.numel() == source.numel()
        assert count <= upper <= 64
        cache[target] = cache[source]

    monkeypatch.setattr(memory_pool, "copy_all_layer_kv_cache_func", copy)
    places = torch.arange(depth)
    first = 8 * torch.arange(requests)[:, None]
    target, source = first + places, first + places + (places > 0)  # each overwrites the next's
    expected = cache.clone()
    expected[target.flatten()] = cache[source.flatten()]
    pool._move_kv_cache_impl(target.flatten(), source.flatten())
    assert torch.equal(cache, expected)
    assert len(sizes) == launches
    assert sum(count for count, _ in sizes) == requests * depth


def test_only_higher_limits_of_copies_are_lowered():
    for config, found in (
        ({"num_locs_upper": 128}, {"num_locs_upper": 64}),
        ({"num_locs_upper": 32}, {"num_locs_upper": 32}),
        (None, None),
    ):
        pool = SimpleNamespace(_kv_copy_config=config)
        limit_copies(pool)
        assert pool._kv_copy_config == found
    limit_copies(SimpleNamespace())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_logits_of_captured_rounds_are_those_of_the_head(dtype):
    processor: Any = LogitsProcessor.__new__(LogitsProcessor)
    torch.nn.Module.__init__(processor)
    processor.vocab_size, processor.final_logit_softcapping = 10, None
    model: Any = SimpleNamespace(logits_processor=processor)
    logits = torch.randn(3, 16).to(dtype)  # six of padding
    metadata = SimpleNamespace(next_token_logits_buffer=torch.full((3, 10), torch.nan))
    with unconverted_logits(model):
        found = processor._copy_logits_to_buffer(logits, metadata, use_buffer=True)
    assert found.dtype == dtype
    assert torch.equal(found, logits[:, :10])
    assert found.data_ptr() == logits.data_ptr()
    assert metadata.next_token_logits_buffer.isnan().all()
    stock = processor._copy_logits_to_buffer(logits, metadata, use_buffer=True)
    assert stock is metadata.next_token_logits_buffer
    assert torch.equal(stock, found.float())
    with pytest.raises(RuntimeError, match="capture"), unconverted_logits(model):
        raise RuntimeError("capture failed")
    assert "_copy_logits_to_buffer" not in vars(processor)


def test_logits_that_are_capped_or_of_another_class_stay_sglangs():
    capped: Any = LogitsProcessor.__new__(LogitsProcessor)
    torch.nn.Module.__init__(capped)
    capped.vocab_size, capped.final_logit_softcapping = 10, 30.0
    other = SimpleNamespace(vocab_size=10, final_logit_softcapping=None)
    for model in (
        SimpleNamespace(logits_processor=capped),
        SimpleNamespace(logits_processor=other),
        SimpleNamespace(),
    ):
        with unconverted_logits(model):
            assert "_copy_logits_to_buffer" not in vars(getattr(model, "logits_processor", model))


def test_unquantised_embeddings_look_up_by_indexing():
    def table(method):
        made: Any = VocabParallelEmbedding.__new__(VocabParallelEmbedding)
        torch.nn.Module.__init__(made)
        made.weight = torch.nn.Parameter(torch.randn(9, 4), requires_grad=False)
        made.quant_method = method
        return made

    class Quantised(UnquantizedEmbeddingMethod):
        pass

    plain, quantised = table(UnquantizedEmbeddingMethod()), table(Quantised())
    model = torch.nn.ModuleList([torch.nn.ModuleList([plain]), quantised, torch.nn.Embedding(9, 4)])
    assert install_lookups(model) == 1
    assert type(quantised.quant_method) is Quantised
    stock = UnquantizedEmbeddingMethod()
    for ids in (
        torch.tensor([8, 0, 3, 3]),
        torch.tensor([[1], [7]]),
        torch.tensor([], dtype=torch.int64),
    ):
        found = plain.quant_method.embedding(plain, ids)
        assert torch.equal(found, stock.embedding(plain, ids))
        assert found.data_ptr() != plain.weight.data_ptr() or not ids.numel()
    assert install_lookups(model) == 0


def test_map_fit_reports_what_is_new_since_its_last_report(caplog):
    counters = Counters(*(SimpleNamespace(values=[]) for _ in range(3)))
    for counter in counters:
        counter.inc = counter.values.append
    fit = MapFit(torch.tensor([1, 2]), 10, 2, counters)
    rounds = [
        ([[1, 2, 9], [1, 0, 0]], [3, 1], [4, 5]),
        ([[1, 7, 0], [9, 9, 9]], [2, 3], [4, 0]),  # the second is padding
        ([[8, 8, 8], [2, 2, 2]], [3, 3], [4, 5]),
        ([[1, 1, 1], [1, 1, 1]], [1, 1], [4, 5]),
    ]
    said = []
    with caplog.at_level("INFO", "sgl_frspec.map_fit"):
        for tokens, lens, rows in [*rounds, rounds[-1]]:
            fit.count(*map(torch.tensor, (tokens, lens, rows)))
            fit.after_round()
            said.append(len(caplog.messages))
    # Every second round asks, the one after it has the answer.
    assert said == [0, 0, 1, 1, 2]
    assert caplog.messages[0].startswith(
        "FRSPEC: accept length 2.00, tokens outside the map 33.33%"
    )
    assert "outside the map 37.50% (35.71% since the start)" in caplog.messages[1]
    assert [counter.values for counter in counters] == [[3, 4], [6, 8], [2, 3]]


def test_prometheus_serves_the_counters():
    counters = prometheus_counters("m")
    for counter, value in zip(counters, (2, 6, 1), strict=True):
        counter.inc(value)
    text = generate_latest().decode()
    assert 'sglang:frspec_cycles_total{model_name="m"} 2.0' in text
    assert 'sglang:frspec_tokens_total{model_name="m"} 6.0' in text
    assert 'sglang:frspec_outside_map_total{model_name="m"} 1.0' in text


def test_norms_that_follow_the_batch_are_refused_for_deterministic_inference(monkeypatch):
    for target_norms, deterministic in ((False, True), (True, False), (True, True)):
        monkeypatch.setenv(ENVIRONMENT_VARIABLE, json.dumps({"target_norms": target_norms}))
        arguments = SimpleNamespace(enable_deterministic_inference=deterministic)
        if target_norms and deterministic:
            with pytest.raises(OptionError, match="leave one of them out"):
                refuse_rounding_by_batch(arguments)
        else:
            refuse_rounding_by_batch(arguments)


@pytest.mark.parametrize(
    ("options", "deterministic", "models"),
    [
        (Options(), False, ["draft"]),
        (Options(), True, []),
        (Options(stock=("norms",)), False, []),
        (Options(target_norms=True), False, ["draft", "target"]),
        (Options(stock=("norms",), target_norms=True), False, ["target"]),
    ],
)
def test_whose_norms_run_on_our_kernels(options, deterministic, models):
    assert models_on_our_norms(options, deterministic=deterministic) == models


def test_limits_of_the_tree_are_the_kernels():
    assert algorithm.MAX_STEPS == tree_args.MAX_STEPS
    assert algorithm.MAX_TOP_K == tree_args.MAX_TOP_K
    assert algorithm.MAX_NODES == tree_args.MAX_NODES


def phases(**changes: Any) -> tuple[Any, Any]:
    """A draft worker and a target's runner whose rounds can be captured, but for ``changes``."""
    backend = object.__new__(TritonAttnBackend)
    pool = object.__new__(MHATokenToKVPool)
    target = {"attn_backend": backend, "page_size": 1, "token_to_kv_pool": pool, "mrope": False}
    draft = {
        "draft_extend_attn_backend": backend,
        "draft_attn_backend": SimpleNamespace(attn_backends=[backend]),
        "cuda_graph_runner_for_draft_extend": object(),
        "speculative_num_steps": 3,
        "topk": 4,
        "head": object(),
        "builder": object(),
        "stock": (),
    }
    arguments = {
        "enable_torch_compile": False,
        "enable_return_routed_experts": False,
        "expert_distribution_recorder_mode": None,
    }
    target |= {name: value for name, value in changes.items() if name in target}
    draft |= {name: value for name, value in changes.items() if name in draft}
    target["model_config"] = SimpleNamespace(model_is_mrope=target.pop("mrope"))
    arguments |= {name: value for name, value in changes.items() if name in arguments}
    draft["server_args"] = SimpleNamespace(**arguments)
    draft["options"] = Options(stock=draft.pop("stock"))
    draft["draft_runner"] = SimpleNamespace(token_to_kv_pool=pool)
    return SimpleNamespace(**draft), SimpleNamespace(**target)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"cuda_graph_runner_for_draft_extend": None}, "no CUDA graph of the draft's extend"),
        # As on FA3, under which SGLang captures none.
        (
            {"attn_backend": SimpleNamespace(), "cuda_graph_runner_for_draft_extend": None},
            "not frspec or triton",
        ),
        ({"speculative_num_steps": 1}, "forward pass"),
        ({"head": None}, "not all ours"),
        ({"builder": None}, "not all ours"),
        ({"stock": ("accept",)}, "not all ours"),
        ({"attn_backend": SimpleNamespace()}, "not frspec or triton"),
        ({"draft_attn_backend": SimpleNamespace(attn_backends=[object()])}, "not frspec or triton"),
        ({"page_size": 16}, "pages of their own"),
        ({"token_to_kv_pool": object()}, "plain one"),
        ({"mrope": True}, "multimodal"),
        ({"enable_torch_compile": True}, "compiled"),
        ({"enable_return_routed_experts": True}, "experts"),
        ({"expert_distribution_recorder_mode": "stat"}, "experts"),
    ],
)
def test_rounds_that_cannot_be_captured_say_why(changes, words):
    assert obstacle(*phases()) is None
    assert words in (obstacle(*phases(**changes)) or "")


def test_chains_on_pages_and_our_backend_on_pages_can_be_captured():
    assert obstacle(*phases(page_size=16, topk=1)) is None
    ours = object.__new__(TritonAttnBackend)
    ours.mask_words = None  # pyright: ignore[reportAttributeAccessIssue]
    assert obstacle(*phases(page_size=16, attn_backend=ours)) is None


def test_table_of_slots_is_free_early_only_if_the_draft_has_copied_the_contexts():
    def backend(copies: bool, drafted: bool) -> Any:
        shared = SimpleNamespace(draft_decode_copies=drafted)
        return SimpleNamespace(mask_words=None, copies_contexts=copies, shared=shared)

    assert copies_contexts_first(backend(True, True), backend(True, True))
    for other in (backend(True, False), backend(False, True), SimpleNamespace()):
        assert not copies_contexts_first(backend(True, True), other)
