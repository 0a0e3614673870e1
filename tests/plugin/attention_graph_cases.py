# ruff: noqa: TID251 (these run where SGLang is)
"""The attention backend in CUDA graphs: whole rounds, on a GPU recorded and replayed.

Run like ``attention_backend_cases.py``.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.layers.attention.triton_backend import (
    TritonAttnBackend,
    TritonMultiStepDraftBackend,
)
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from frspec_kernels.draft_attention import pack_mask
from sgl_frspec.attention_backend import FrSpecAttentionBackend
from sgl_frspec.attention_backend_draft import (
    FrSpecMultiStepDraftBackend,
)
from tests.kernels.attention_problem import CUDA, DEVICE
from tests.plugin.attention_server import (
    NODES,
    STEPS,
    TOP_K,
    RequestPool,
    Server,
    check_draft,
    configuration,  # noqa: F401 (a fixture of every case)
    extend_problem,
    random_trees,
    run_draft,
    verdict_of,
    verify_problem,
)


class Replayed:
    """A pass as a CUDA graph: recorded once on a GPU; without one, run again at every replay."""

    def __init__(self, run: Callable[[], Any]) -> None:
        self.run = run
        self.graph: torch.cuda.CUDAGraph | None = None
        self.out: Any = None
        if CUDA:
            run()
            torch.cuda.synchronize()
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.out = run()

    def __call__(self) -> Any:
        if self.graph is None:
            return self.run()
        self.graph.replay()
        return self.out


class GraphRound:
    """Draft steps, verification and draft extend in graphs of ``size`` requests."""

    def __init__(self, server, size: int, *, draft: bool = True, max_batch: int = 5) -> None:
        self.server, self.size = server, size
        self.rows = torch.zeros(size, dtype=torch.int64, device=DEVICE)
        self.seq_lens = torch.ones(size, dtype=torch.int64, device=DEVICE)
        self.extended = torch.ones(size, dtype=torch.int64, device=DEVICE)
        self.slots = torch.zeros(size, NODES, dtype=torch.int64, device=DEVICE)
        self.positions = torch.zeros(size, NODES, dtype=torch.int64, device=DEVICE)
        self.tokens = [server.tokens(size * NODES) for _ in range(3)]
        self.target = FrSpecAttentionBackend(server.runner())
        self.steps = FrSpecMultiStepDraftBackend(server.runner(draft=True), TOP_K, STEPS)
        if not draft:
            self.steps.shared.draft_decode_copies = False
        self.extend = FrSpecAttentionBackend(server.runner(draft=True))
        for backend in (self.target, self.steps, self.extend):
            backend.init_cuda_graph_state(max_batch, max_batch * NODES)
        self.copies = 0
        self._count_copies(self.target.shared)
        self.run_draft = self._record_draft() if draft else None
        self.run_verify = self._record(self.target, ForwardMode.TARGET_VERIFY, self.tokens[1])
        self.run_extend = self._record(self.extend, ForwardMode.DRAFT_EXTEND_V2, self.tokens[2])
        self.copies = 0

    def _count_copies(self, shared) -> None:
        copy = shared.copy

        def counted(*args, **options):
            self.copies += 1
            return copy(*args, **options)

        shared.copy = counted

    def view(self, mode: ForwardMode, **fields) -> Any:
        """The batch that a graph runner shows: its own memory, padded to the graph's size."""
        extend = mode == ForwardMode.DRAFT_EXTEND_V2
        slots = self.slots if mode != ForwardMode.DECODE else self.slots[:, : TOP_K * STEPS]
        shown = {
            "batch_size": self.size,
            "req_pool_indices": self.rows,
            "seq_lens": self.extended if extend else self.seq_lens,
            "out_cache_loc": slots.reshape(-1),
            "positions": self.positions.view(-1),
            "spec_info": SimpleNamespace(custom_mask=None, num_tokens_per_req=NODES),
        }
        return self.server.batch_of(mode, 1, **(shown | fields))

    def _record(self, backend, mode, tokens) -> Replayed:
        batch = self.view(mode)
        backend.init_forward_metadata_out_graph(batch, in_capture=True)
        layer = self.server.layer(window=-1 if self.server.window is None else self.server.window)

        q, k, v = tokens

        def run():
            backend.init_forward_metadata_in_graph(batch)
            return backend.forward_extend(q, k, v, layer, batch)

        return Replayed(run)

    def _record_draft(self) -> Replayed:
        batch = self.view(ForwardMode.DECODE)
        self.steps.init_forward_metadata_out_graph(batch, in_capture=True)
        each = [[t[: self.size * TOP_K] for t in tokens] for tokens in self.tokens[: STEPS - 1]]
        server = SimpleNamespace(batch=self.size, layer=self.server.layer)

        def run():
            self.steps.init_forward_metadata_in_graph(batch)
            return run_draft(server, self.steps, batch, each)

        return Replayed(run)

    def fill(self, seen, depths, kind: str) -> Any:
        """What a runner copies in before a round; the mask in its graph's memory or elsewhere."""
        server, batch = self.server, self.server.batch
        self.rows.zero_()
        self.seq_lens.fill_(1)
        self.extended.fill_(1)
        self.slots.zero_()
        self.rows[:batch] = server.rows
        self.seq_lens[:batch] = server.contexts
        self.extended[:batch] = server.contexts + NODES
        self.positions[:batch] = server.contexts[:, None] + depths
        places = server.contexts[:, None] + torch.arange(NODES, device=DEVICE)
        self.slots[:batch] = server.pool.req_to_token[server.rows[:, None], places].long()
        bits = pack_mask(seen.view(-1, NODES))
        if kind == "bits in place":
            assert self.target.mask_words is not None
            self.target.mask_words[: bits.shape[0]] = bits
            return self.target.mask_words
        if kind == "bytes in place":
            assert self.target.verify_mask is not None
            self.target.verify_mask.buffer[: seen.numel()] = seen.flatten()
            return self.target.verify_mask.buffer
        return bits if kind == "bits" else seen.flatten()


def fresh_tokens(recorded, count: int) -> list[torch.Tensor]:
    for tensor in recorded:
        tensor.copy_(torch.randn_like(tensor))
    return [tensor[:count].clone() for tensor in recorded]


def check_round(graphs: GraphRound, kind: str, *, draft: bool = True) -> None:
    server, count = graphs.server, graphs.server.batch
    visible, seen, depths = verify_problem(server, random_trees(count))
    mask = graphs.fill(seen, depths, kind)
    tokens = [fresh_tokens(recorded, count * NODES) for recorded in graphs.tokens]
    graphs.copies = 0
    if graphs.run_draft is not None and draft:
        graphs.steps.init_forward_metadata_out_graph(graphs.view(ForwardMode.DECODE))
        outs = graphs.run_draft()
        each = [[t[: count * TOP_K] for t in step] for step in tokens[: STEPS - 1]]
        check_draft(server, [out[: count * TOP_K].clone() for out in outs], each)
    view = graphs.view(ForwardMode.TARGET_VERIFY)
    view.spec_info.custom_mask = mask
    graphs.target.init_forward_metadata_out_graph(view)
    window = -1 if server.window is None else server.window
    verdict = verdict_of(graphs.run_verify(), server, tokens[1], visible, window=window)
    assert verdict.ok, verdict.why
    graphs.extend.init_forward_metadata_out_graph(graphs.view(ForwardMode.DRAFT_EXTEND_V2))
    problem = extend_problem(server, NODES)
    verdict = verdict_of(graphs.run_extend(), server, tokens[2], problem, window=window)
    assert verdict.ok, verdict.why


@pytest.mark.parametrize(
    ("size", "kinds"), [(2, ["bits in place", "bytes"]), (4, ["bytes in place", "bits"])]
)
def test_rounds_in_graphs_copy_the_contexts_once(size, kinds):
    """Two rounds of other requests, in graphs as large as the batch or larger."""
    server = Server([1, 1])
    graphs = GraphRound(server, size)
    for kind, contexts in zip(kinds, ([11, 88], [60, 0]), strict=True):
        server.move_to(contexts)
        check_round(graphs, kind)
        assert graphs.copies == (0 if CUDA else 1)


def test_verification_copies_the_contexts_where_the_draft_does_not():
    server = Server([33], window=12)
    graphs = GraphRound(server, 1, draft=False)
    for contexts in ([33], [70]):
        server.move_to(contexts)
        check_round(graphs, "bits")
        assert graphs.copies == (0 if CUDA else 1)


def test_draft_extend_copies_them_outside_its_graph_where_nothing_else_does():
    server = Server([33, 9])
    graphs = GraphRound(server, 3, draft=False)
    graphs.target.shared.verify_copies = False
    _, seen, depths = verify_problem(server, random_trees(2))
    graphs.fill(seen, depths, "bits")
    tokens = fresh_tokens(graphs.tokens[2], 2 * NODES)
    graphs.extend.init_forward_metadata_out_graph(graphs.view(ForwardMode.DRAFT_EXTEND_V2))
    assert graphs.copies == 1
    verdict = verdict_of(graphs.run_extend(), server, tokens, extend_problem(server, NODES))
    assert verdict.ok, verdict.why


def test_an_idle_rank_replays_without_a_mask():
    """Under data parallelism a rank without requests shows a mask of another layout."""
    graphs = GraphRound(Server([1]), 1)
    words = graphs.target.mask_words
    assert words is not None
    words.fill_(5)
    view = graphs.view(ForwardMode.TARGET_VERIFY, actual_forward_mode=ForwardMode.IDLE)
    view.spec_info.custom_mask = torch.ones(77, dtype=torch.uint8, device=DEVICE)
    graphs.target.init_forward_metadata_out_graph(view)
    assert (words == 5).all()


def tensor_bytes(*owners: Any) -> int:
    """Memory of the tensors that these objects hold, each once."""
    values = [value for owner in owners for value in vars(owner).values()]
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


def test_graphs_take_a_fraction_of_sglangs_memory():
    """Buffers of graphs of up to 32 requests with contexts of up to 8,192 tokens."""
    server = Server([1])
    server.pool = RequestPool(32, 8192)
    runners = server.runner(), server.runner(draft=True)
    for runner in runners:
        runner.model_config.context_len = 8192
    sizes = {}
    for name, target, steps in (
        ("sglang", TritonAttnBackend, TritonMultiStepDraftBackend),
        ("ours", FrSpecAttentionBackend, FrSpecMultiStepDraftBackend),
    ):
        phases = [target(runners[0]), steps(runners[1], TOP_K, STEPS), target(runners[1])]
        before = tensor_bytes(*phases)
        for phase, nodes in zip(phases, (NODES, TOP_K, NODES), strict=True):
            phase.init_cuda_graph_state(32, 32 * nodes)
        shared = getattr(phases[0], "shared", None)
        reserved = [] if shared is None else [shared._reserved]
        mask = phases[0].verify_mask
        assert mask is not None
        sizes[name] = tensor_bytes(*phases, *reserved) - before + mask.buffer.nbytes
    # One list of int32 a request, against int64 lists a token of each phase and step.
    assert sizes["ours"] < 32 * 8192 * 4 * 1.02
    assert sizes["sglang"] > 30 * sizes["ours"]
