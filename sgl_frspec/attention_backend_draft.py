"""Draft decoding on ``frspec``: the branches of a request share one read of its context.

All steps of a round are prepared by one launch, at the head of the draft's CUDA graph: it copies
the contexts. Which of the round's slots a branch sees at which step never changes.
"""

from typing import TYPE_CHECKING, Any

from sglang.srt.layers.attention.triton_backend import TritonMultiStepDraftBackend
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.runtime_context import get_spec
from torch import Tensor

from frspec_kernels.draft_attention import DraftBranches, draft_branches
from sgl_frspec.attention_backend import FrSpecAttentionBackend
from sgl_frspec.attention_backend_buffers import Contexts
from sgl_frspec.attention_backend_pass import TreePass, refuse_layer

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner


class FrSpecDraftStepBackend(FrSpecAttentionBackend):
    """Attention of one draft step; the multi-step backend sets its pass."""

    def init_forward_metadata(self, forward_batch: "ForwardBatch") -> None:
        """Nothing to do: all steps are prepared at once, through the multi-step backend."""

    def forward_decode(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layer: "RadixAttention",
        forward_batch: "ForwardBatch",
        save_kv_cache: bool = True,
        sinks: Tensor | None = None,
        score_mod: Any = None,
        aux_tensors: Any = None,
    ) -> Tensor:
        """Attention of the step's branches: ``[B * top-k, Hq * Dv]``."""
        refuse_layer(layer, score_mod)
        assert self.tree_pass is not None
        if save_kv_cache:
            k = k.view(-1, layer.tp_k_head_num, layer.qk_head_dim)
            v = v.view(-1, layer.tp_v_head_num, layer.v_head_dim)
            self.save(k, v, layer, forward_batch, keep=False)
        return self.attend(q, self.tree_pass.tree, layer, sinks)


class FrSpecMultiStepDraftBackend(TritonMultiStepDraftBackend):
    """The draft's decode steps: one backend a step, prepared together before the first."""

    def __init__(self, model_runner: "ModelRunner", topk: int, speculative_num_steps: int) -> None:
        super().__init__(model_runner, topk, speculative_num_steps)
        # The last step's tokens are never fed back, so it needs no forward pass.
        steps = range(speculative_num_steps - 1)
        self.steps = [
            FrSpecDraftStepBackend(model_runner, True, self.kv_indptr[step]) for step in steps
        ]
        self.attn_backends = list(self.steps)
        self.shared = self.steps[0].shared
        self.shared.draft_decode_copies = True
        self._branches: dict[int, DraftBranches] = {}

    def init_forward_metadata(self, forward_batch: "ForwardBatch") -> None:
        """Prepare all steps of a round that no CUDA graph runs."""
        contexts = self.shared.copy(forward_batch.req_pool_indices, forward_batch.seq_lens)
        self._make_passes(forward_batch, contexts)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Memory for rounds in CUDA graphs."""
        self.shared.reserve(max_bs)

    def init_forward_metadata_out_graph(
        self, forward_batch: "ForwardBatch", in_capture: bool = False
    ) -> None:
        """Replays refresh nothing: the graph copies the contexts itself."""
        if in_capture:
            self._make_passes(forward_batch, self.shared.contexts(forward_batch.batch_size))

    def init_forward_metadata_in_graph(self, forward_batch: "ForwardBatch") -> None:
        """Copy the contexts, for the draft and for the rest of the round."""
        self.shared.copy(forward_batch.req_pool_indices, forward_batch.seq_lens)

    def _make_passes(self, forward_batch: "ForwardBatch", contexts: Contexts) -> None:
        batch = forward_batch.batch_size
        if batch not in self._branches:
            self._branches[batch] = draft_branches(
                batch, self.topk, self.speculative_num_steps, self.device
            )
        # Slots are listed request by request, branch by branch, step by step. The draft binds the
        # batch to one step's slots later on; this keeps all of them.
        slots: Any = forward_batch.out_cache_loc
        for step, backend in enumerate(self.steps):
            tree = self._branches[batch].tree(slots, step)
            backend.tree_pass = TreePass(tree, contexts, contexts)


def create_decode_backend(
    model_runner: "ModelRunner", topk: int, speculative_num_steps: int
) -> TritonMultiStepDraftBackend:
    """The draft's decode backend: SGLang's for caches and windows that ours does not draft over."""
    own_pool = type(model_runner.token_to_kv_pool) is MHATokenToKVPool
    windowed = model_runner.sliding_window_size or get_spec().speculative_draft_window_size
    if not own_pool or windowed:
        return TritonMultiStepDraftBackend(model_runner, topk, speculative_num_steps)
    return FrSpecMultiStepDraftBackend(model_runner, topk, speculative_num_steps)
