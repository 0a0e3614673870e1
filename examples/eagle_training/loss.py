"""Cross-entropy of drafted hidden states through the frozen head, without keeping the logits.

The head has no gradient, so the gradient of the loss with respect to a hidden state is
``(softmax(z) - q) @ head`` and can be formed while the logits ``z`` are at hand; only it is kept.
The labels ``q`` mix the target's distribution with its greedy choice: ``(1 - g) p + g onehot``.

N positions, H hidden size, V vocabulary, J drafting steps.
"""

from typing import Any, NamedTuple

import torch

_CHUNK = 4096


class HeadLoss(NamedTuple):
    """Sums over the positions, weighted; divide by the weights' sum."""

    loss: torch.Tensor  # [J] float32, differentiable
    hits: torch.Tensor  # [J] float32, where the drafted best token is the target's


def _labels(target_logits: torch.Tensor, greedy_share: float) -> tuple[torch.Tensor, torch.Tensor]:
    logits = target_logits.float()
    best = logits.argmax(dim=-1)
    soft = torch.softmax(logits, dim=-1) * (1 - greedy_share)
    columns = torch.arange(logits.shape[1], device=logits.device)
    mixed = torch.where(columns == best[:, None], soft + greedy_share, soft)
    return mixed.to(target_logits.dtype), best


def _loss_and_gradient(
    logits: torch.Tensor, labels: torch.Tensor, best: torch.Tensor, weights: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    z, q = logits.float(), labels.float()
    log_sum = torch.logsumexp(z, dim=-1)
    loss = (log_sum - (z * q).sum(-1)) * weights
    gradient = (torch.exp(z - log_sum[:, None]) - q) * weights[:, None]
    hits = (z.argmax(dim=-1) == best) * weights
    return loss.sum(), hits.sum(), gradient.to(logits.dtype)


if torch.cuda.is_available():
    _labels = torch.compile(_labels, dynamic=False)
    _loss_and_gradient = torch.compile(_loss_and_gradient, dynamic=False)


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        drafted: torch.Tensor,
        target: torch.Tensor,
        weights: torch.Tensor,
        head: torch.Tensor,
        greedy_share: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        steps, count, _ = drafted.shape
        gradient = torch.empty_like(drafted)
        loss = drafted.new_zeros(steps, dtype=torch.float32)
        hits = torch.zeros_like(loss)
        for start in range(0, count, _CHUNK):
            part = slice(start, start + _CHUNK)
            labels, best = _labels(target[part] @ head.T, greedy_share)
            for j in range(steps):
                logits = drafted[j, part] @ head.T
                results = _loss_and_gradient(logits, labels, best, weights[j, part])
                loss[j] += results[0]
                hits[j] += results[1]
                gradient[j, part] = results[2] @ head
        ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(hits)
        return loss, hits

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        return gradient * grads[0][:, None, None].to(gradient.dtype), None, None, None, None


def head_loss(
    drafted: torch.Tensor,
    target: torch.Tensor,
    weights: torch.Tensor,
    head: torch.Tensor,
    greedy_share: float,
) -> HeadLoss:
    """Cross-entropy of every drafting step against the target's mixed labels.

    Args:
        drafted: ``[J, N, H]`` draft outputs, dtype of ``head``.
        target: ``[N, H]`` the target's hidden states at the same positions.
        weights: ``[J, N]`` float32; zero leaves a position out.
        head: ``[V, H]`` frozen.
        greedy_share: weight g of the greedy choice in the labels.
    """
    extra = -drafted.shape[1] % _CHUNK if drafted.is_cuda else 0
    if extra:  # one shape for the compiled pieces
        drafted = torch.nn.functional.pad(drafted, (0, 0, 0, extra))
        target = torch.nn.functional.pad(target, (0, 0, 0, extra))
        weights = torch.nn.functional.pad(weights, (0, extra))
    return HeadLoss(*_HeadLoss.apply(drafted, target, weights, head, greedy_share))
