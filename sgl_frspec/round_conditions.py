"""When rounds can be captured whole, and what their attention backends allow."""

from typing import Any

from sglang.srt.layers.attention.triton_backend import TritonAttnBackend
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.speculative.spec_utils import SIMULATE_ACC_LEN

from sgl_frspec.verify_input import takes_mask_words


def obstacle(draft_worker: Any, target_runner: Any) -> str | None:
    """Why rounds cannot be captured whole on this server, or None."""
    backends = (
        target_runner.attn_backend,
        draft_worker.draft_extend_attn_backend,
        *getattr(draft_worker.draft_attn_backend, "attn_backends", []),
    )
    server_args = draft_worker.server_args
    paged_tree = target_runner.page_size > 1 and draft_worker.topk > 1
    reasons = {
        "the draft needs a forward pass a round": draft_worker.speculative_num_steps < 2,
        "head, tree and acceptance are not all ours": draft_worker.head is None
        or draft_worker.builder is None
        or not draft_worker.options.uses("accept"),
        # Before the graphs: some of those backends are why SGLang captured none.
        "the attention backend is not frspec or triton": not all(
            isinstance(backend, TritonAttnBackend) for backend in backends
        ),
        "SGLang captured no CUDA graph of the draft's extend pass": not (
            draft_worker.cuda_graph_runner_for_draft_extend
        ),
        "triton gives tree branches pages of their own": paged_tree
        and not takes_mask_words(backends[0]),
        "accept lengths are simulated": SIMULATE_ACC_LEN > 0,
        "the KV cache is not SGLang's plain one": any(
            type(runner.token_to_kv_pool) is not MHATokenToKVPool
            for runner in (target_runner, draft_worker.draft_runner)
        ),
        "the model has multimodal positions": target_runner.model_config.model_is_mrope,
        "the target is compiled": server_args.enable_torch_compile,
        "the choice of experts is recorded": server_args.enable_return_routed_experts
        or server_args.expert_distribution_recorder_mode is not None,
        "cache canaries are on": getattr(target_runner, "canary_manager", None) is not None,
    }
    return next((reason for reason, present in reasons.items() if present), None)


def copies_contexts_first(*backends: Any) -> bool:
    """Whether these backends read the table of slots at the head of a round, and not again."""
    return all(
        takes_mask_words(backend) and backend.copies_contexts and backend.shared.draft_decode_copies
        for backend in backends
    )
