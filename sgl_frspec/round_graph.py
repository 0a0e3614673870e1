"""A whole greedy round as one CUDA graph: draft, verification, acceptance, the draft's extend pass.

SGLang runs each phase as a graph of its own, with about a hundred launches between them, which the
host cannot issue as fast as a GPU runs a round of one request. Nothing in a greedy round depends on
the host, so here it is captured once for each batch size, after SGLang's own graphs, which remain
for every other kind of batch.
"""

import bisect
import logging
from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
from sglang.srt.model_executor.runner import get_batch_sizes_to_capture, model_capture_mode
from sglang.srt.model_executor.runner_utils.pool import get_or_create_global_graph_memory_pool
from sglang.srt.speculative.eagle_info import EagleDraftInput
from sglang.srt.speculative.eagle_utils import get_draft_recurrent_hidden_state_spec
from torch import Tensor

from frspec_kernels.tree import Accepted, Candidates
from sgl_frspec.round_conditions import copies_contexts_first
from sgl_frspec.round_state import RoundBatches, RoundInputs
from sgl_frspec.target_logits import unconverted_logits
from sgl_frspec.verify import accept_tree, slot_moves, tokens_at_front

logger = logging.getLogger(__name__)

_WARM_UPS = 2
# Where the scheduler looks for the event after which it may change the table of slots again.
_READ_DONE = ("shared_read_done_event", "war_fastpath_read_done_event")


@dataclass
class CapturedRound:
    """One batch size: its graph, what every replay prepares, and where the outcome lies."""

    graph: torch.cuda.CUDAGraph
    batches: RoundBatches
    phases: list[tuple[Any, Any]]  # attention backends and their batches, in order
    read_done: torch.cuda.Event
    outcome: "Outcome | None" = None


@dataclass
class Outcome:
    """What a round leaves: tensors over its requests, in the memory of the graph."""

    report: Tensor  # [B * N + B] int32: accepted tokens first, then the accept lengths
    accepted: Accepted
    probs: Tensor
    token_ids: Tensor
    hidden: Tensor


class RoundGraphs:
    """The captured rounds of one server."""

    def __init__(self, draft_worker: Any, target_runner: Any) -> None:
        self.draft = draft_worker
        self.target = target_runner
        self.shape = draft_worker.shape
        self.sizes = sorted(get_batch_sizes_to_capture(draft_worker.draft_runner)[0])
        self._padding = target_runner.attn_backend.get_cuda_graph_seq_len_fill_value()
        hidden_size, dtype = get_draft_recurrent_hidden_state_spec(draft_worker.draft_runner)
        if hidden_size is None or dtype is None:
            raise RuntimeError("the draft carries no hidden states from round to round")
        self._inputs = RoundInputs(
            self.sizes[-1],
            draft_worker.relayed,
            hidden_size,
            dtype,
            torch.device(target_runner.device),
        )
        self._inputs.seq_lens.fill_(self._padding)
        self._logits = target_runner.graph_shared_output.get_logits_buffer(
            target_runner.model_config.vocab_size, rows=self.sizes[-1] * self.shape.nodes
        )
        self._copies_contexts = copies_contexts_first(
            target_runner.attn_backend, draft_worker.draft_extend_attn_backend
        )
        self._rounds: dict[int, CapturedRound] = {}
        self._stream = torch.cuda.Stream()
        with model_capture_mode(), unconverted_logits(target_runner.model):
            for size in reversed(self.sizes):
                self._rounds[size] = self._capture(size)
        logger.info("FRSPEC captured whole rounds of %s requests", self.sizes)

    def fits(self, requests: int) -> bool:
        """Whether a batch of this size has a graph."""
        return requests <= self.sizes[-1]

    def run(self, batch: Any, on_publish: Any, *, copy_all: bool) -> GenerationBatchResult:
        """One round of a ``ScheduleBatch``; see SGLang's ``forward_batch_generation``.

        Args:
            batch: plain greedy, of at most the largest size.
            on_publish: told the new lengths.
            copy_all: copy what the next round starts from out of the graph's memory.
        """
        requests, draft_input = batch.seq_lens.shape[0], batch.spec_info
        size = self.sizes[bisect.bisect_left(self.sizes, requests)]
        captured = self._rounds[size]
        self._inputs.fill(batch, draft_input, size, self._padding)
        self._prepare(captured)
        captured.graph.replay()
        self._publish_reads(captured)
        outcome = captured.outcome
        assert outcome is not None
        following = (
            outcome.accepted.bonus_tokens[:requests],
            outcome.probs[:requests],
            outcome.token_ids[:requests],
            outcome.hidden[:requests],
            outcome.accepted.new_seq_lens[:requests],
        )
        if copy_all:
            following = tuple(tensor.clone() for tensor in following)
        bonus_tokens, probs, token_ids, hidden, new_seq_lens = following
        if on_publish is not None:
            on_publish(new_seq_lens)
        # Another stream copies these to the host while the next round may already run.
        report = outcome.report.clone()
        nodes = size * self.shape.nodes
        return GenerationBatchResult(
            logits_output=LogitsProcessorOutput(None),
            next_token_ids=report[: requests * self.shape.nodes],
            can_run_cuda_graph=True,
            speculative_num_draft_tokens=self.shape.nodes,
            next_draft_input=EagleDraftInput(
                bonus_tokens=bonus_tokens,
                topk_p=probs,
                topk_index=token_ids,
                hidden_states=hidden,
                num_tokens_per_req=1,
                num_tokens_for_logprob_per_req=1,
            ),
            accept_lens=report[nodes : nodes + requests],
            new_seq_lens=new_seq_lens,
            extra_keep_alive_refs=[batch.seq_lens, batch.req_pool_indices, draft_input],
        )

    def _prepare(self, captured: CapturedRound) -> None:
        """What the attention backends do before a replay: all follows from the old lengths."""
        batches = captured.batches
        torch.add(batches.seq_lens, batches.width, out=batches.extended_lens)
        for backend, forward_batch in captured.phases:
            backend.init_forward_metadata_out_graph(forward_batch)

    def _publish_reads(self, captured: CapturedRound) -> None:
        """Let the scheduler go on when the graph has read the table of slots.

        Backends that read it later get no event: the scheduler then waits for the whole round.
        """
        done = captured.read_done if self._copies_contexts else None
        for name in _READ_DONE:
            if hasattr(self.draft.draft_runner, name):
                setattr(self.draft.draft_runner, name, done)

    def _capture(self, size: int) -> CapturedRound:
        path = min(self.shape.steps + 1, self.shape.nodes)
        width = path if self._copies_contexts else self.shape.nodes
        batches = RoundBatches(
            self._inputs, size, self.shape, width, self.draft.draft_runner.spec_algorithm
        )
        captured = CapturedRound(
            torch.cuda.CUDAGraph(), batches, [], torch.cuda.Event(external=True)
        )
        verify_input = self.draft.builder.allocate(batches.seq_lens, None, self.target.attn_backend)
        logits = self._logits[: size * self.shape.nodes]
        captured.phases = [
            (self.draft.draft_attn_backend, batches.draft),
            (self.target.attn_backend, batches.verify(verify_input, logits)),
            (self.draft.draft_extend_attn_backend, batches.extend()),
        ]
        torch.add(batches.seq_lens, width, out=batches.extended_lens)
        for backend, forward_batch in captured.phases:
            with forward_context(ForwardContext(attn_backend=backend)):
                backend.init_forward_metadata_out_graph(forward_batch, in_capture=True)
            forward_batch.mark_forward_metadata_ready()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for _ in range(_WARM_UPS):
                self._round(captured)
        torch.cuda.synchronize()
        pool = get_or_create_global_graph_memory_pool(torch.cuda)
        with torch.cuda.graph(captured.graph, pool=pool, stream=self._stream):
            captured.outcome = self._round(captured)
        return captured

    def _round(self, captured: CapturedRound) -> Outcome:
        """What the graph holds."""
        batches, draft = captured.batches, self.draft
        (draft_backend, drafting), (_, verifying), _ = captured.phases
        batches.locate(draft.req_to_token_pool.req_to_token)
        draft_backend.init_forward_metadata_in_graph(drafting)
        if torch.cuda.is_current_stream_capturing():
            captured.read_done.record()
        drafting.spec_info.hidden_states = self._inputs.hidden[: batches.batch]
        grown = draft.draft_forward(drafting, bare=True)
        drafting.out_cache_loc = batches.draft_slots  # the steps have set it to theirs
        verify_input = verifying.spec_info
        draft.builder.fill(
            verify_input,
            Candidates(*grown[:3]),
            self._inputs.bonus_tokens[: batches.batch],
            batches.seq_lens,
            self.target.attn_backend,
        )
        output = self._forward(self.target, *captured.phases[1])
        accepted = accept_tree(
            verify_input, output.next_token_logits, batches.seq_lens, batches.node_slots
        )
        if self.shape.top_k > 1:
            cache = self.target.token_to_kv_pool
            cache.move_kv_cache(*slot_moves(accepted))
        return self._extend(captured, accepted, output.hidden_states)

    def _extend(self, captured: CapturedRound, accepted: Accepted, hidden: Tensor) -> Outcome:
        """The draft's pass over what was accepted, and the proposals that the next round uses."""
        backend, extending = captured.phases[2]
        batches = captured.batches
        tokens = tokens_at_front(accepted, self.shape.nodes)
        lines = tokens.view(batches.batch, -1)
        self.draft.map_fit.count(lines, accepted.accept_lens, batches.rows)
        ids = lines[:, : batches.width].flatten()
        extending.input_ids = ids.long()
        spec = extending.spec_info
        spec.hidden_states = hidden[path_rows(accepted, self.shape.nodes, batches.width)]
        spec.num_accept_tokens = accepted.accept_lens
        spec.num_correct_drafts = accepted.accept_lens - 1
        output = self._forward(self.draft.draft_runner, backend, extending)
        proposals = self.draft.head.after_verification(batches.batch)
        return Outcome(
            torch.cat([tokens, accepted.accept_lens]),
            accepted,
            proposals.probs,
            proposals.token_ids,
            output.hidden_states,
        )

    @staticmethod
    def _forward(runner: Any, backend: Any, forward_batch: Any) -> Any:
        with forward_context(ForwardContext(attn_backend=backend)):
            backend.init_forward_metadata_in_graph(forward_batch)
            return runner.model.forward(
                forward_batch.input_ids, forward_batch.positions, forward_batch
            )


def path_rows(accepted: Accepted, nodes: int, width: int) -> Tensor:
    """``[B * width]`` row of each node of the accepted paths; what follows them is never read."""
    requests, depth = accepted.accept_index.shape
    first = torch.arange(0, requests * nodes, nodes, device=accepted.accept_index.device)
    rows = first[:, None] + torch.arange(width, device=first.device)
    depth = min(depth, width)
    path = accepted.accept_index[:, :depth]
    rows[:, :depth] = torch.where(path >= 0, path.long(), rows[:, :depth])
    return rows.flatten()
