"""When a draft head's result is right: the rule of :mod:`bench.checks` for its probabilities.

What is compared is the logarithm of each returned probability: its error is the relative error of
the probability. The stock chain's error in a row is its worst among the row's ``YARDSTICK_IDS``
most probable ids (for the log-sum-exp, of their logits). Those are where the top-k comes from; over
so many, no lucky zero of PyTorch's decides, and the tail of the vocabulary, whose logits may round
more coarsely, excuses nothing.

The stock chain rounds logits to the type of hidden, 0.02 to 0.06 of a logit in bf16. A kernel that
keeps float32 logits must also hold against PyTorch's chain in float32, some thousand times sharper:
this is what shows a wrong tile, a lost slice or an inexact sum. Its bound lies below 1.5 times what
the stock chain is off at the few values that it returns itself, so :func:`check_float32` also says
that no result is further off than 1.5 times the stock chain's own, which ``max_error`` of a table's
rows shows directly.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from bench.checks import SLACK, Verdict, fail, topk_matches, ulp

YARDSTICK_IDS = 64
# Tensor cores add this many products at a time and cut off what does not fit: half a unit in the
# last place of the sum each time, always towards zero.
TENSOR_CORE_STEP = 16
EXPONENTIAL_ULPS = 16  # the GPU's own exponential, of logits far below the largest


@dataclass(frozen=True)
class Reference:
    """Logits [B, V], and the token id of each column.

    Attributes:
        truth: in fp64.
        stock: of the stock chain: rounded to the type of hidden.
        float32: of the same chain with float32 products and sums.
        width: H, which each logit is a sum over.
        token_ids: [V].
    """

    truth: Tensor
    stock: Tensor
    float32: Tensor
    width: int
    token_ids: Tensor


class _Bounds(NamedTuple):
    """What may be off in each row: [B, 1]."""

    log_probs: Tensor
    lse: Tensor


def check(out: tuple[Tensor, ...], ref: Reference) -> Verdict:
    """Probabilities [B, k], ids [B, k] and, if there is one, log-sum-exp [B]: as good as stock."""
    worst = _worst(ref.stock, ref.truth, out[0].shape[1])
    bounds = _Bounds(*(SLACK * error for error in worst))
    return _within(out, ref, bounds, "the stock chain's error")


def check_float32(out: tuple[Tensor, ...], ref: Reference) -> Verdict:
    """:func:`check`, and as good as float32 logits are, summed as tensor cores do."""
    largest = ref.truth.abs().amax(1, keepdim=True).clamp(min=1)
    ulps = ref.width / TENSOR_CORE_STEP / 2 + EXPONENTIAL_ULPS
    worst = _worst(ref.float32, ref.truth, out[0].shape[1])
    bounds = _Bounds(*(SLACK * error + ulps * ulp(largest, torch.float32) for error in worst))
    return check(out, ref) & _within(out, ref, bounds, "what float32 logits allow")


def _worst(logits: Tensor, truth: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Largest errors of the log-probabilities and of the logits of a row's most probable ids."""
    count = min(max(k, YARDSTICK_IDS), truth.shape[1])
    ids = truth.topk(count, dim=1).indices
    off = logits.gather(1, ids).double() - truth.gather(1, ids)
    lse_off = logits.logsumexp(1, keepdim=True).double() - truth.logsumexp(1, keepdim=True)
    return (off - lse_off).abs().amax(1, keepdim=True), off.abs().amax(1, keepdim=True)


def _within(out: tuple[Tensor, ...], ref: Reference, bounds: _Bounds, limit: str) -> Verdict:
    """``bounds``, and one unit in the last place."""
    probs, token_ids, *lse = out
    columns = _columns(token_ids, ref.token_ids)
    if columns is None:
        return fail("a token id is not in the map")
    true_lse = ref.truth.logsumexp(1, keepdim=True)
    log_p = ref.truth - true_lse
    of_each = bounds.log_probs + ulp(log_p.gather(1, columns), torch.float32)
    verdict = topk_matches(probs.double().log(), columns, log_p, of_each)
    for sums in lse:
        verdict &= _close(sums, true_lse[:, 0], bounds.lse[:, 0])
    return verdict if verdict.ok else fail(f"beyond {limit}: {verdict.why}", verdict.error)


def _columns(token_ids: Tensor, known: Tensor) -> Tensor | None:
    """Where ``token_ids`` [B, k] stand in ``known`` [V], or None if one does not."""
    order = known.argsort()
    at = torch.searchsorted(known[order], token_ids.contiguous()).clamp(max=len(known) - 1)
    columns = order[at]
    return columns if (known[columns] == token_ids).all() else None


def _close(lse: Tensor, truth: Tensor, bound: Tensor) -> Verdict:
    off = (lse.double() - truth).abs()
    limit = bound + ulp(truth, lse.dtype)
    if (off <= limit).all():  # NaN is not
        return Verdict(True, off.max().item() if off.numel() else 0.0)
    return fail(f"log-sum-exp {lse.tolist()}, truth {truth.tolist()} ± {limit.tolist()}")
