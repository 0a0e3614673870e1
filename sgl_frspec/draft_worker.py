"""The draft of a round: it proposes a token tree over the hot ids, and keeps its cache up to date.

Follows SGLang's ``EagleDraftWorker`` phase by phase. Every piece that ``--frspec-stock`` names runs
on SGLang's own functions, so that each can be measured alone.
"""

import inspect
import logging
from typing import Any

import torch
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
from sglang.srt.model_executor.runner import get_batch_sizes_to_capture
from sglang.srt.speculative.eagle_draft_extend_cuda_graph_runner import (
    EAGLEDraftExtendCudaGraphRunner,
)
from sglang.srt.speculative.eagle_info import EagleDraftExtendInput
from sglang.srt.speculative.eagle_utils import per_step_draft_out_cache_loc
from sglang.srt.speculative.eagle_worker_common import (
    prepare_for_draft,
    prepare_for_draft_extend,
)
from sglang.srt.speculative.eagle_worker_v2 import EagleDraftWorker
from sglang.srt.utils.common import fast_topk
from torch import Tensor

from frspec_kernels.reduced_topk_args import HIDDEN_DTYPES
from frspec_kernels.tree import Candidates, TreeShape
from sgl_frspec.draft_head import DraftHead, accepted_rows, without_logits
from sgl_frspec.draft_tree import KernelGrowth, StockGrowth, TreeGrowth
from sgl_frspec.drawn_proposals import DrawnProposals, list_size
from sgl_frspec.embedding import install_lookups
from sgl_frspec.hot_ids import read_hot_ids
from sgl_frspec.map_fit import make_map_fit
from sgl_frspec.norms import install_norms, models_on_our_norms
from sgl_frspec.options import OptionError, read_options
from sgl_frspec.reduced_head import gather_head, share_embedding_and_head
from sgl_frspec.verify_input import TreeBuilder

logger = logging.getLogger(__name__)

# Newer releases also take the batch, for mixture-of-experts models, and the accepted rows.
_CONTEXT_TAKES_BATCH = "forward_batch" in inspect.signature(forward_context).parameters
_EXTEND_TAKES_ROWS = (
    "select_index" in inspect.signature(EAGLEDraftExtendCudaGraphRunner.execute).parameters
)


class FrSpecDraftWorker(EagleDraftWorker):
    """Drafts over the hot ids. Draft ids are rows of the reduced head, ascending by token id."""

    hot_token_id: Tensor
    # SGLang sets these to None first and to objects of several classes later.
    cuda_graph_runner: Any
    cuda_graph_runner_for_draft_extend: Any
    draft_attn_backend: Any
    draft_runner: Any
    req_to_token_pool: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.options = read_options()
        # Before the KV pool takes the memory that is left; SGLang itself gathers afterwards.
        self._reduce_head()
        self.shape = TreeShape(
            self.topk, self.speculative_num_steps, self.speculative_num_draft_tokens
        )
        draws, hot_ids = self.options.draws, len(self.hot_token_id)
        # Proposals that a round starts from.
        self.relayed = list_size(self.topk, hot_ids) if draws else self.topk
        self.drawn = (
            DrawnProposals(self.shape, self.relayed, self.hot_token_id.device) if draws else None
        )
        self.head = self._install_head() if self.options.uses("head") else None
        self.builder = TreeBuilder(self.shape, draws=draws) if self.options.uses("tree") else None
        self._install_norms()
        self._install_lookups()
        self.map_fit = make_map_fit(
            _decided(self.server_args),
            self.hot_token_id,
            self.target_worker.model_runner.model_config.vocab_size,
        )
        # With overlap, SGLang copies what a round leaves to the next into buffers of its own.
        # Without, it keeps the tensors, and the memory of CUDA graphs would be overwritten.
        self.relay_copies = not _decided(self.server_args).disable_overlap_schedule

    def _reduce_head(self) -> None:
        runner = self.target_worker.model_runner
        target: Any = runner.model
        embedding, head = target.get_embed_and_head()
        ids = torch.from_numpy(read_hot_ids(_decided(self.server_args)).ids).to(embedding.device)
        reduced = gather_head(head, ids, runner.model_config.vocab_size)
        self.freed_bytes = share_embedding_and_head(self.draft_runner.model, embedding, reduced)
        self.hot_token_id = ids
        logger.info(
            "FRSPEC draft head: %d x %d, %.0f MB", *reduced.shape, reduced.nbytes / (1 << 20)
        )

    def _install_head(self) -> DraftHead:
        model: Any = self.draft_runner.model
        dtype = model.lm_head.weight.dtype
        if self.hot_token_id.is_cuda and dtype not in HIDDEN_DTYPES:
            raise OptionError(
                f"FRSPEC's head multiplies bfloat16 or float16, not {dtype}: serve with --dtype"
                " bfloat16, or add --frspec-stock head"
            )
        model.logits_processor = DraftHead(
            self.topk, self.relayed, self.hot_token_id, model.logits_processor
        )
        return model.logits_processor

    def _install_norms(self) -> None:
        if not self.hot_token_id.is_cuda:
            return
        models = {"draft": self.draft_runner.model, "target": self.target_worker.model_runner.model}
        chosen = models_on_our_norms(
            self.options, deterministic=_decided(self.server_args).enable_deterministic_inference
        )
        ours = {name: install_norms(models[name]) for name in chosen}
        logger.info("FRSPEC RMSNorms: %s", ours or "SGLang's")

    def _install_lookups(self) -> None:
        if self.hot_token_id.is_cuda:
            for model in (self.draft_runner.model, self.target_worker.model_runner.model):
                install_lookups(model)

    def init_token_map(self) -> None:
        """Nothing left to do when the pools have been made."""

    def init_lm_head(self) -> None:
        """Likewise."""

    def _capture_cuda_graphs(self) -> None:
        if self.head is not None and self.hot_token_id.is_cuda:
            batches, _ = get_batch_sizes_to_capture(self.draft_runner)
            if self.drawn is not None:
                # No batch has more requests than the table of slots has rows.
                self.drawn.reserve(max(*batches, self.req_to_token_pool.size))
            dtype = self.draft_runner.model_config.dtype
            self.head.reserve(max(batches), self.draft_runner.model.lm_head.weight, dtype)
            with without_logits(self.draft_runner):
                super()._capture_cuda_graphs()
        else:
            super()._capture_cuda_graphs()

    def draft(self, batch: Any, **kwargs: Any) -> Any:
        """Draft a tree for every request; returns what the target is to verify."""
        if self.builder is None:
            return super().draft(batch, **kwargs)
        draft_input = batch.spec_info
        if self.drawn is not None:
            draft_input.topk_p, draft_input.topk_index = self.drawn.begin(
                batch.sampling_info, batch.seq_lens, draft_input.topk_p, draft_input.topk_index
            )
        forward_batch, use_graph, *_ = prepare_for_draft(
            draft_input,
            self.req_to_token_pool,
            batch,
            self.cuda_graph_runner,
            self.draft_runner,
            self.topk,
            self.speculative_num_steps,
        )
        if use_graph:
            grown = self.cuda_graph_runner.execute(forward_batch)
        else:
            if self.speculative_num_steps > 1:
                self.draft_attn_backend.init_forward_metadata(forward_batch)
                forward_batch.mark_forward_metadata_ready()
            grown = self.draft_forward(forward_batch)
        backend = self.target_worker.model_runner.attn_backend
        found = self.builder.build(Candidates(*grown[:3]), draft_input.bonus_tokens, batch, backend)
        if self.drawn is not None:
            found.lists = self.drawn.lists(found.tree)
        return found

    def draft_forward(
        self, forward_batch: Any, *, bare: bool = False
    ) -> tuple[Tensor, Tensor, Tensor, None]:
        """All draft steps of a round; SGLang's graph runner captures this.

        ``bare`` runs the model itself, on a batch whose tensors stay where they are; SGLang's
        runner would copy them into buffers of its own at every step. Its requests are greedy.
        """
        drawn = None if bare else self.drawn
        spec_info = forward_batch.spec_info
        slots = per_step_draft_out_cache_loc(
            forward_batch.out_cache_loc,
            forward_batch.batch_size,
            self.topk,
            self.speculative_num_steps,
        )
        growth = self._growth(forward_batch.batch_size)
        probs = spec_info.topk_p[:, : self.topk]
        token_ids = self._relayed_tokens(spec_info.topk_index[:, : self.topk])
        hidden = spec_info.hidden_states
        for step in range(self.speculative_num_steps):
            beams = growth.grow(step, probs, token_ids, hidden)
            if beams is None:
                break
            forward_batch.input_ids = beams.tokens
            forward_batch.out_cache_loc = slots[step]
            spec_info.hidden_states = beams.hidden
            if drawn is not None and self.head is not None:
                self.head.write_step_to(drawn.list_of(step + 1))
            output = self._run_step(step, forward_batch, bare)
            if drawn is None:
                probs, token_ids = self._proposals(output)
            else:
                probs, token_ids = drawn.draw(step + 1, forward_batch.batch_size)
            hidden = output.hidden_states
            forward_batch.positions.add_(1)
        return (*growth.finish(), None)

    def _draft_extend_for_prefill(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Run the draft over the prompts; returns what the first round starts from."""
        draft_input = super()._draft_extend_for_prefill(batch, *args, **kwargs)
        if self.head is not None:
            proposals = self.head.last()
            draft_input.topk_p, draft_input.topk_index = proposals.probs, proposals.token_ids
        return draft_input

    def _draft_extend_for_decode(self, batch: Any, batch_result: Any, **kwargs: Any) -> None:
        """Run the draft over the accepted tokens; ``batch_result`` gets the next proposals."""
        if self.head is None:
            super()._draft_extend_for_decode(batch, batch_result, **kwargs)
            return
        requests, nodes = batch.seq_lens.shape[0], self.speculative_num_draft_tokens
        accepted = batch_result.accept_lens
        extend_input = EagleDraftExtendInput(
            hidden_states=batch_result.logits_output.hidden_states,
            num_correct_drafts=accepted - 1,
            num_accept_tokens=accepted,
            num_tokens_per_req=nodes,
            num_tokens_for_logprob_per_req=nodes,
        )
        forward_batch = prepare_for_draft_extend(
            extend_input,
            batch,
            batch_result.next_token_ids.long(),
            nodes,
            self.draft_runner,
            self.cuda_graph_runner_for_draft_extend,
            return_hidden_states_before_norm=False,
        )
        hidden = self._run_draft_extend(forward_batch)[:requests]
        proposals = self.head.after_verification(requests)
        relayed = hidden, proposals.probs, proposals.token_ids
        if not self.relay_copies:
            relayed = (tensor.clone() for tensor in relayed)
        following = batch_result.next_draft_input
        following.hidden_states, following.topk_p, following.topk_index = relayed

    def _run_draft_extend(self, forward_batch: Any) -> Tensor:
        """The hidden states that the next round starts from, in the first rows."""
        graphs = self.cuda_graph_runner_for_draft_extend
        if not graphs or not graphs.can_run_graph(forward_batch):
            return self.draft_runner.forward(forward_batch).logits_output.hidden_states
        rows = [accepted_rows(forward_batch)] if _EXTEND_TAKES_ROWS else []
        return graphs.execute(forward_batch, *rows).hidden_states

    def _growth(self, batch: int) -> TreeGrowth:
        if self.builder is None:
            return StockGrowth(self.shape)
        return KernelGrowth(self.shape, batch, self.hot_token_id.device)

    def _run_step(self, step: int, forward_batch: Any, bare: bool) -> Any:
        context = ForwardContext(attn_backend=self.draft_attn_backend.attn_backends[step])
        extra = {"forward_batch": forward_batch} if _CONTEXT_TAKES_BATCH else {}
        with forward_context(context, **extra):
            if bare:
                return self.draft_runner.model.forward(
                    forward_batch.input_ids, forward_batch.positions, forward_batch
                )
            return self.draft_runner.forward(forward_batch).logits_output

    def _proposals(self, output: Any) -> tuple[Tensor, Tensor]:
        """Probabilities and token ids of the rows of a draft step."""
        if self.head is not None:
            proposals = self.head.last()
            return proposals.probs, proposals.token_ids
        probs, rows = _stock_top_k(output.next_token_logits, self.topk)
        return probs, self.hot_token_id[rows]

    def _relayed_tokens(self, relayed: Tensor) -> Tensor:
        """Between rounds SGLang carries draft ids; our head gives token ids from the start."""
        return relayed if self.head is not None else self.hot_token_id[relayed]


def _stock_top_k(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    return fast_topk(torch.softmax(logits, dim=-1), k, dim=-1)


def _decided(server_args: Any) -> Any:
    """The arguments as SGLang decided them; its older releases write decisions into the record."""
    try:
        from sglang.srt.arg_groups.overrides import resolving_view
    except ImportError:
        return server_args
    return resolving_view(server_args)
