# ruff: noqa: TID251 (these run where SGLang is)
"""The attention backend on a small server's objects, against PyTorch and against SGLang's backend.

``test_attention_backend.py`` runs this file in a process where SGLang can be imported without a
GPU; on a machine with one, pytest runs it as it is.
"""

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from sglang.srt.configs.model_config import AttentionArch
from sglang.srt.layers.attention.triton_backend import (
    TritonAttnBackend,
    TritonMultiStepDraftBackend,
)
from sglang.srt.layers.attention.verify_mask import VerifyMask
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.speculative.eagle_utils import TreeMaskMode

from bench.checks import no_worse_than_torch
from sgl_frspec.attention_backend import FrSpecAttentionBackend
from sgl_frspec.attention_backend_draft import (
    FrSpecMultiStepDraftBackend,
    create_decode_backend,
)
from sgl_frspec.options import OptionError
from tests.kernels.attention_problem import DEVICE
from tests.plugin.attention_server import (
    DIM,
    DTYPE,
    KV_HEADS,
    NODES,
    Q_HEADS,
    STEPS,
    TOP_K,
    Server,
    check_draft,
    configuration,  # noqa: F401 (a fixture of every case)
    dense,
    draft_batch,
    extend_problem,
    random_trees,
    run_draft,
    verdict_of,
    verify_batch,
    verify_problem,
)


def check_verify(server, kind="bits", layer_options=None, **options):
    trees = random_trees(server.batch)
    visible, seen, depths = verify_problem(server, trees)
    backend = FrSpecAttentionBackend(server.runner())
    batch = verify_batch(server, seen, depths, kind)
    backend.init_forward_metadata(batch)
    q, k, v = server.tokens(server.batch * NODES)
    layer = server.layer(window=options.get("window", -1), **(layer_options or {}))
    sinks = {"sinks": options["sinks"]} if "sinks" in options else {}
    out = backend.forward_extend(q, k, v, layer, batch, **sinks)
    same, truth = dense(server, q, k, v, visible, **options)
    verdict = no_worse_than_torch(out, same, truth)
    assert verdict.ok, verdict.why
    written = server.cache.get_key_buffer(0)[batch.out_cache_loc]
    assert torch.equal(written, k.reshape(written.shape).to(written.dtype))
    return q, k, v, seen, depths, out


RAGGED = [0, 40, 5, 77]


@pytest.mark.parametrize(
    ("contexts", "page", "kind"),
    [([1], 1, "bytes"), ([37], 4, "bits"), (RAGGED, 1, "bits"), (RAGGED, 4, "bytes")],
)
def test_verify(contexts, page, kind):
    check_verify(Server(contexts, page=page), kind)


def test_verify_with_a_sliding_window():
    server = Server([70, 3, 20], window=17)
    check_verify(server, window=17)
    check_verify(server, "bytes", window=1)


def test_verify_with_a_cap_a_scale_and_sinks():
    sinks = torch.randn(Q_HEADS, device=DEVICE)
    options = {"scaling": 0.4, "logit_cap": 3.0}
    check_verify(Server([50, 7]), layer_options=options, scaling=0.4, cap=3.0, sinks=sinks)


@pytest.mark.parametrize("contexts", [[37], RAGGED])
def test_verify_equals_sglangs_triton_backend(contexts):
    server = Server(contexts)
    q, k, v, seen, depths, out = check_verify(server)
    full = []
    for b, length in enumerate(contexts):
        context = torch.ones(NODES, length, dtype=torch.bool, device=DEVICE)
        full.append(torch.cat([context, seen[b]], 1).flatten())
    stock = TritonAttnBackend(server.runner())
    batch = verify_batch(server, seen, depths, "bytes")
    batch.spec_info.custom_mask = torch.cat(full)
    stock.init_forward_metadata(batch)
    heads = server.batch * NODES, KV_HEADS, DIM
    theirs = stock.forward_extend(q, k.reshape(heads), v.reshape(heads), server.layer(), batch)
    torch.testing.assert_close(out, theirs, rtol=2e-2, atol=4e-3)


@pytest.mark.parametrize(
    ("contexts", "width", "window"),
    [([1], NODES, -1), ([37], 1, 9), (RAGGED, 1, -1), (RAGGED, NODES, 9)],
)
def test_draft_extend(contexts, width, window):
    server = Server(contexts, page=4)
    backend = FrSpecAttentionBackend(server.runner(draft=True))
    batch = server.batch_of(
        ForwardMode.DRAFT_EXTEND_V2,
        width,
        seq_lens=server.contexts + width,
        extend_seq_lens_cpu=[width] * server.batch,
    )
    backend.init_forward_metadata(batch)
    q, k, v = server.tokens(server.batch * width)
    out = backend.forward_extend(q, k, v, server.layer(window=window), batch)
    same, truth = dense(server, q, k, v, extend_problem(server, width), window=window)
    verdict = no_worse_than_torch(out, same, truth)
    assert verdict.ok, verdict.why


@pytest.mark.parametrize(("contexts", "page"), [([37], 1), (RAGGED, 1), (RAGGED, 4)])
def test_draft_steps(contexts, page):
    server = Server(contexts, page=page)
    backend = FrSpecMultiStepDraftBackend(server.runner(draft=True), TOP_K, STEPS)
    batch = draft_batch(server)
    backend.init_forward_metadata(batch)
    tokens = [server.tokens(server.batch * TOP_K) for _ in range(STEPS - 1)]
    check_draft(server, run_draft(server, backend, batch, tokens), tokens)


class OtherPool(MHATokenToKVPool):
    """A cache of another kind, as pools are that translate slots."""


def test_other_caches_use_sglangs_lists_of_slots():
    """The same results, eagerly and in graphs, without a copy of the contexts."""
    server = Server([70, 3], window=17)
    server.cache.__class__ = OtherPool
    check_verify(server, window=17)
    check_verify(server, "bytes")
    backend = FrSpecAttentionBackend(server.runner())
    assert not backend.copies_contexts
    backend.init_cuda_graph_state(2, 2 * NODES)
    visible, seen, depths = verify_problem(server, random_trees(2))
    q, k, v = (t.view(2 * NODES, -1, DIM) for t in map(torch.clone, server.tokens(2 * NODES)))
    layer = server.layer(window=17)
    for kind in ("bits", "bytes where SGLang writes them"):
        batch = verify_batch(server, seen, depths, kind.split()[0])
        backend.init_forward_metadata_out_graph(batch, in_capture=True)
        if kind != "bits":
            assert backend.verify_mask is not None
            assert backend.verify_mask.mode == TreeMaskMode.QLEN_ONLY
            backend.verify_mask.buffer[: seen.numel()] = seen.flatten()
            batch.spec_info.custom_mask = backend.verify_mask.buffer
        backend.init_forward_metadata_out_graph(batch)
        backend.init_forward_metadata_in_graph(batch)
        assert batch.spec_info.custom_mask is not None
        out = backend.forward_extend(q, k, v, layer, batch)
        verdict = verdict_of(out, server, (q, k, v), visible, window=17)
        assert verdict.ok, (kind, verdict.why)


def test_layers_that_share_keys_read_them_from_the_cache():
    server = Server([20, 4])
    backend = FrSpecAttentionBackend(server.runner())
    visible, seen, depths = verify_problem(server, random_trees(2))
    batch = verify_batch(server, seen, depths, "bits")
    backend.init_forward_metadata(batch)
    q, k, v = server.tokens(2 * NODES)
    none: Any = None
    backend.forward_extend(q, k, v, server.layer(), batch)
    out = backend.forward_extend(q, none, none, server.layer(), batch)
    verdict = verdict_of(out, server, (q, k, v), visible)
    assert verdict.ok, verdict.why


def test_prefill_is_sglangs():
    server = Server([1, 30])
    ours, theirs = FrSpecAttentionBackend(server.runner()), TritonAttnBackend(server.runner())
    batch = server.batch_of(
        ForwardMode.EXTEND,
        4,
        seq_lens=server.contexts + 4,
        extend_prefix_lens=server.contexts,
        extend_prefix_lens_cpu=server.contexts.tolist(),
        extend_seq_lens=torch.tensor([4, 4], device=DEVICE),
        extend_seq_lens_cpu=[4, 4],
    )
    # A verification before it must leave nothing behind.
    _, seen, depths = verify_problem(server, random_trees(2))
    ours.init_forward_metadata(verify_batch(server, seen, depths, "bits"))
    q, k, v = (t.reshape(8, -1, DIM) for t in server.tokens(8))
    outs = []
    for backend in (ours, theirs):
        backend.init_forward_metadata(batch)
        outs.append(backend.forward_extend(q.flatten(1), k, v, server.layer(), batch))
    assert torch.equal(*outs)
    verdict = verdict_of(outs[0], server, (q, k, v), extend_problem(server, 4))
    assert verdict.ok, verdict.why


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"head_dim": 320}, "head dim of 320"),
        ({"attention_arch": AttentionArch.MLA}, "latent attention"),
    ],
)
def test_what_tree_attention_lacks_is_refused_with_a_remedy(change, message):
    runner = Server([1]).runner()
    vars(runner.model_config).update(change)
    with pytest.raises(OptionError, match=f"{message}.*; use --attention-backend triton"):
        FrSpecAttentionBackend(runner)


def test_caches_that_the_kernel_cannot_read_are_refused():
    with pytest.raises(
        OptionError, match=r"KV cache of torch.float8_e5m2.*attention-backend triton"
    ):
        FrSpecAttentionBackend(Server([1], dtype=torch.float8_e5m2).runner())


def test_masks_over_the_context_are_refused():
    server = Server([8])
    _, seen, depths = verify_problem(server, random_trees(1))
    batch = verify_batch(server, seen, depths, "bytes")
    batch.spec_info.custom_mask = torch.ones(NODES * (8 + NODES), dtype=torch.bool, device=DEVICE)
    with pytest.raises(ValueError, match="takes masks over the nodes alone"):
        FrSpecAttentionBackend(server.runner()).init_forward_metadata(batch)


def test_sglangs_tree_builder_is_told_to_write_bytes_over_the_nodes():
    server = Server([1, 1])
    backend = FrSpecAttentionBackend(server.runner())
    mask = backend.verify_mask
    assert isinstance(mask, VerifyMask)
    assert mask.mode == TreeMaskMode.QLEN_ONLY
    assert mask.fits(server.pool.size)
    assert mask.buffer.numel() == mask.max_bs * NODES**2
    assert FrSpecAttentionBackend(server.runner(draft=True)).verify_mask is None


@pytest.mark.parametrize("change", [{"window": 8}, {"pool": OtherPool}])
def test_drafts_with_windows_or_other_caches_take_sglangs_steps(change):
    server = Server([1], window=change.get("window"))
    server.cache.__class__ = change.get("pool", MHATokenToKVPool)
    assert type(create_decode_backend(server.runner(draft=True), TOP_K, STEPS)) is (
        TritonMultiStepDraftBackend
    )


def test_plain_drafts_take_our_steps():
    backend = create_decode_backend(Server([1]).runner(draft=True), TOP_K, STEPS)
    assert type(backend) is FrSpecMultiStepDraftBackend
    assert len(backend.attn_backends) == STEPS - 1


def test_scaled_eight_bit_cache():
    server = Server([40, 6], dtype=torch.float8_e4m3fn)
    layer: Any = server.layer()
    layer.k_scale, layer.v_scale = (torch.tensor(x, device=DEVICE) for x in (0.5, 2.0))
    layer.k_scale_float, layer.v_scale_float = 0.5, 2.0
    backend = FrSpecAttentionBackend(server.runner())
    visible, seen, depths = verify_problem(server, random_trees(2))
    batch = verify_batch(server, seen, depths, "bits")
    backend.init_forward_metadata(batch)
    q, k, v = server.tokens(2 * NODES)
    before = k.clone(), v.clone()
    out = backend.forward_extend(q, k, v, layer, batch)
    assert torch.equal(k, before[0])
    assert torch.equal(v, before[1])
    written = server.cache.get_key_buffer(0)[batch.out_cache_loc].float()
    torch.testing.assert_close(written.flatten(1), k.float() / 0.5, rtol=0.07, atol=0.01)
    stored = server.cache
    # The oracle reads what the cache stands for.
    server.cache = cast(Any, SimpleNamespace)(
        get_key_buffer=lambda _: stored.get_key_buffer(0).to(DTYPE) * 0.5,
        get_value_buffer=lambda _: stored.get_value_buffer(0).to(DTYPE) * 2.0,
    )
    verdict = verdict_of(out, server, (q, k, v), visible)
    assert verdict.ok, verdict.why
