"""Verification of greedy batches: the target's pass, acceptance, and the accepted path in order.

Anything but plain greedy decoding (sampling, grammars, penalties, biases, log-probabilities) goes
through SGLang's own verification, which the worker's tree fits.
"""

from typing import Any

import torch
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.speculative.eagle_info import EagleDraftInput
from sglang.srt.speculative.eagle_utils import eagle_prepare_for_verify
from torch import Tensor

from frspec_kernels.tree import Accepted, accept_greedy
from frspec_kernels.tree_reference import accept_greedy_reference
from sgl_frspec.verify_input import TreeVerifyInput


def is_plain_greedy(batch: Any) -> bool:
    """Whether the next tokens of a ``ScheduleBatch`` are the largest of the target's own logits."""
    sampling = batch.sampling_info
    return (
        sampling.is_all_greedy
        and sampling.acc_additive_penalties is None
        and sampling.acc_scaling_penalties is None
        and sampling.logit_bias is None
        and not batch.has_grammar
        and not batch.return_logprob
        and not batch.return_hidden_states
        and not getattr(sampling, "has_watermark_candidates", False)
    )


def verify_greedy(
    batch: Any, target_worker: Any, req_to_token_pool: Any, kv_cache: Any
) -> GenerationBatchResult:
    """Verify the trees of ``batch.spec_info`` and bring what was accepted to the front.

    Args:
        batch: a ``ScheduleBatch`` whose ``seq_lens`` are those before the round.
        target_worker, req_to_token_pool, kv_cache: SGLang's.
    """
    verify_input: TreeVerifyInput = batch.spec_info
    forward_batch, used_graph = eagle_prepare_for_verify(
        verify_input, req_to_token_pool, batch, target_worker
    )
    output = target_worker.forward_batch_generation(
        batch=None, forward_batch=forward_batch, is_verify=True
    )
    logits_output = output.logits_output
    accepted = accept_tree(
        verify_input, logits_output.next_token_logits, batch.seq_lens, batch.out_cache_loc
    )
    if verify_input.topk > 1:
        kv_cache.move_kv_cache(*slot_moves(accepted))
    nodes = verify_input.draft_token_num
    predicts = tokens_at_front(accepted, nodes)
    if verify_input.topk > 1 and logits_output.hidden_states is not None:
        logits_output.hidden_states = rows_at_front(logits_output.hidden_states, accepted, nodes)
    return GenerationBatchResult(
        logits_output=logits_output,
        next_token_ids=predicts,
        can_run_cuda_graph=used_graph,
        speculative_num_draft_tokens=nodes,
        next_draft_input=EagleDraftInput(bonus_tokens=accepted.bonus_tokens.int()),
        accept_lens=accepted.accept_lens,
        new_seq_lens=accepted.new_seq_lens,
        routed_experts_output=output.routed_experts_output,
        indexer_topk_output=output.indexer_topk_output,
        # The next phase rebinds the batch's tensors while this one may still read them.
        extra_keep_alive_refs=[forward_batch, verify_input, accepted],
    )


def accept_tree(
    verify_input: TreeVerifyInput, logits: Tensor, seq_lens: Tensor, slots: Tensor
) -> Accepted:
    """The longest path of each tree that the target's ``logits`` [B * N, V] agree with.

    Args:
        verify_input: the trees.
        logits: at each node.
        seq_lens: ``[B]`` tokens before the root.
        slots: ``[B * N]`` where the nodes' keys and values are.
    """
    tree, depth = verify_input.tree, verify_input.max_tree_depth
    if logits.device.type == "cpu":
        said = logits.argmax(-1).view(tree.tokens.shape)
        return accept_greedy_reference(tree.tokens, tree.parents, said, seq_lens, depth, slots)
    return accept_greedy(tree.tokens, tree.parents, logits, seq_lens, depth, slots=slots)


def tokens_at_front(accepted: Accepted, nodes: int) -> Tensor:
    """``[B * nodes]`` int32: each request's accepted tokens, then padding."""
    path = accepted.path_tokens
    tokens = path.new_zeros((path.shape[0], nodes), dtype=torch.int32)
    width = min(nodes, path.shape[1])
    tokens[:, :width] = path[:, :width]
    return tokens.flatten()


def rows_at_front(rows: Tensor, accepted: Accepted, nodes: int) -> Tensor:
    """``rows`` [B * nodes, …] with those of each request's accepted path first.

    The others keep the rows that were there; nothing reads them.
    """
    requests, depth = accepted.accept_index.shape
    depth = min(nodes, depth)
    first = torch.arange(0, requests * nodes, nodes, device=rows.device)[:, None]
    places = first + torch.arange(depth, device=rows.device)
    path = accepted.accept_index[:, :depth].long()
    moved = rows.clone()
    moved[places] = rows[torch.where(path >= 0, path, places)]
    return moved


def slot_moves(accepted: Accepted) -> tuple[Tensor, Tensor]:
    """Where the accepted path's keys and values go, and where they are: SGLang's order."""
    if accepted.target_slots is None or accepted.source_slots is None:
        raise RuntimeError("the acceptance was not given the cache's slots")
    return accepted.target_slots.flatten(), accepted.source_slots.flatten()
