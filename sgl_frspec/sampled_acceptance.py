"""Requests with temperature > 0: one rule of sampling for prompts and verifications.

SGLang verifies a sampled batch with a rule of its own on the GPU, greedily on the CPU, with seeds
only under ``--enable-deterministic-inference``, and without min-p. :func:`install` puts
:mod:`frspec_kernels.sampling` in its place, in a process that runs FRSPEC and nothing else:

- every request has a seed from its first batch on, its own or a random one;
- the first token of a reply and each verified tree are sampled by the kernels, or on the CPU by
  their reference, with random numbers that follow from the seed and the position alone.

Penalties, biases and grammar masks go into the logits as SGLang puts them there. Batches that are
greedy throughout stay with the code that called.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.layers.sampler import Sampler
from sglang.srt.runtime_context import get_spec
from sglang.srt.sampling.penaltylib.repetition_penalty import apply_scaling_penalties
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from sglang.srt.speculative import eagle_worker_common
from torch import Tensor

from frspec_kernels.sampling import DraftLists, Sampling, accept_sampled
from frspec_kernels.sampling_tree_reference import Thresholds, accepted_on_cpu
from frspec_kernels.tree import Accepted
from sgl_frspec.options import read_options
from sgl_frspec.verify_input import TreeVerifyInput

# Positions of a reply's first token: apart from those of all verifications.
FIRST_TOKENS = 1 << 31
# What SGLang's kernels divide by at the least.
LEAST_THRESHOLD = 1e-9
# Newer releases return what they captured of the distribution too.
_RETURNS_CAPTURE = "Tuple" in str(inspect.signature(Sampler._sample_from_probs).return_annotation)


def install() -> None:
    """Sample by our rule in this process from now on, unless ``--frspec-stock accept`` forbids."""
    if not read_options().uses("accept") or getattr(
        eagle_worker_common.eagle_sample, "by_frspec", False
    ):
        return
    verify = functools.partial(sample_tree, eagle_worker_common.eagle_sample)
    verify.by_frspec = True  # pyright: ignore[reportAttributeAccessIssue]
    eagle_worker_common.eagle_sample = verify
    info: Any = SamplingBatchInfo
    info.from_schedule_batch = classmethod(_then_seed(info.from_schedule_batch.__func__))
    Sampler._sample_from_probs = _first_tokens(Sampler._sample_from_probs)


def sample_tree(
    stock: Callable[..., Any],
    verify_input: Any,
    batch: Any,
    logits_output: Any,
    grammar_mask: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """In place of ``eagle_sample``: tokens at accepted nodes, accepted counts, accepted rows.

    Args:
        stock: what it replaces, for greedy batches and trees that SGLang made.
        verify_input: the batch's trees.
        batch: a ``ScheduleBatch`` whose ``seq_lens`` are those before the round.
        logits_output: its ``next_token_logits`` [B * N, V] are adjusted in place, as by SGLang.
        grammar_mask: of the batch's grammars, if it has any.
        kwargs: of newer releases, for ``stock``.
    """
    info = batch.sampling_info
    ours = isinstance(verify_input, TreeVerifyInput) and info.sampling_seed is not None
    watermarked = getattr(info, "has_watermark_candidates", False)
    if not ours or watermarked or batch.forward_mode.is_idle() or info.is_all_greedy:
        return stock(verify_input, batch, logits_output, grammar_mask, **kwargs)
    logits = logits_output.next_token_logits
    adjust_logits(logits, info, verify_input.draft_token_num, grammar_mask)
    tree = verify_input.tree
    accepted = _accept(
        logits, tree.tokens, tree.parents, batch.seq_lens, verify_input.max_tree_depth, info,
        accept_thresholds() if verify_input.lists is None else Thresholds(),
        lists=verify_input.lists,
    )  # fmt: skip
    return accepted.predicts, accepted.accept_lens, accepted.accept_index


def accept_thresholds() -> Thresholds:
    """``--speculative-accept-threshold-single`` and ``-acc``: 1 is lossless, less accepts more.

    Read at each verification: newer servers let them be changed.
    """
    spec: Any = get_spec()
    accumulated = max(spec.speculative_accept_threshold_acc, LEAST_THRESHOLD)
    return Thresholds(spec.speculative_accept_threshold_single, accumulated)


def adjust_logits(logits: Tensor, info: Any, nodes: int, grammar_mask: Any) -> None:
    """Penalties, biases and grammars into ``logits`` [B * nodes, V], in SGLang's order.

    A request's penalties are the same at all nodes: they do not know the drafted tokens.
    """
    if info.acc_additive_penalties is not None:
        logits.add_(info.acc_additive_penalties.repeat_interleave(nodes, dim=0))
    if info.acc_scaling_penalties is not None:
        apply_scaling_penalties(logits, info.acc_scaling_penalties.repeat_interleave(nodes, dim=0))
    if info.logit_bias is not None:
        logits.add_(info.logit_bias.repeat_interleave(nodes, dim=0))
    if grammar_mask is not None:
        grammar_mask.apply(logits)


def sampling_of(info: Any, temperatures: Tensor | None = None) -> Sampling:
    """A ``SamplingBatchInfo`` as the kernels take it; SGLang's greedy requests have a top-k of 1.

    Args:
        info: with seeds.
        temperatures: others than the requests' own, ``[B]`` float32.
    """
    own = info.temperatures.flatten() if temperatures is None else temperatures
    truncates = info.need_top_k_sampling or info.need_top_p_sampling or info.need_min_p_sampling
    return Sampling(
        own.float().contiguous(), info.top_ks.int(), info.top_ps.float(), info.min_ps.float(),
        info.sampling_seed.long(), truncates,
    )  # fmt: skip


def _accept(
    logits: Tensor,
    tokens: Tensor,
    parents: Tensor,
    seq_lens: Tensor,
    max_path: int,
    info: Any,
    thresholds: Thresholds,
    temperatures: Tensor | None = None,
    lists: DraftLists | None = None,
) -> Accepted:
    sampling = sampling_of(info, temperatures)
    if logits.device.type == "cpu":
        return accepted_on_cpu(
            logits, tokens, parents, seq_lens, max_path, sampling, lists, thresholds
        )
    return accept_sampled(
        logits, tokens, parents, seq_lens, max_path, sampling,
        lists=lists, threshold_single=thresholds.single, threshold_acc=thresholds.accumulated,
    )  # fmt: skip


def _then_seed(describe: Callable[..., Any]) -> Callable[..., Any]:
    """``SamplingBatchInfo.from_schedule_batch`` that leaves no request without a seed."""

    @functools.wraps(describe)
    def from_schedule_batch(cls: type, batch: Any, *args: Any, **kwargs: Any) -> Any:
        info = describe(cls, batch, *args, **kwargs)
        if info.sampling_seed is None:
            seeds = torch.randint(-(2**63), 2**63 - 1, (len(batch.reqs),))
            for place, request in enumerate(batch.reqs):
                own = request.sampling_params.sampling_seed
                if isinstance(own, int):
                    # Older releases let any number through, and a larger one would end the server.
                    seeds[place] = (own + 2**63) % 2**64 - 2**63
            info.sampling_seed = seeds.to(batch.device, non_blocking=True)
        return info

    return from_schedule_batch


def _first_tokens(stock: Callable[..., Any]) -> Callable[..., Any]:
    """``Sampler._sample_from_probs`` by our rule: a tree of one node each."""

    @functools.wraps(stock)
    def sample(self: Any, probs: Tensor, info: Any, positions: Tensor, simple: bool) -> Any:
        captures = getattr(info, "sampling_mask_batch_indices", None) is not None
        if captures or info.sampling_seed is None:
            return stock(self, probs, info, positions, simple)
        root = torch.zeros(len(probs), 1, dtype=torch.int64, device=probs.device)
        accepted = _accept(
            probs.log(), root, (root - 1).int(), positions.long() + FIRST_TOKENS, 1, info,
            Thresholds(), torch.ones(len(probs), device=probs.device),
        )  # fmt: skip
        # The temperature is in the probabilities already.
        ids = accepted.bonus_tokens.int()
        return (ids, None) if _RETURNS_CAPTURE else ids

    return sample
