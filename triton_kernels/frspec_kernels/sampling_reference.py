"""Sampling from the target through a drafted tree: the rule in PyTorch, for any floating type.

The derivation is in ``docs/sampling.md``. Letters: ``V`` target vocabulary, ``C`` candidates of a
node, ``m`` children of a node, ``p`` the target's distribution, ``q`` the draft's.
"""

from dataclasses import dataclass

import torch


def target_distribution(
    logits: torch.Tensor,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> torch.Tensor:
    """Probabilities that sampling follows at one position.

    Temperature, softmax, top-k, renormalise, top-p, min-p, renormalise. Among equal logits the
    smaller id is kept. NaN counts as minus infinity, an infinite logit takes everything, and a
    row without any finite logit gives all probability to id 0.

    Args:
        logits: ``[V]``.
        temperature: 0 is greedy; infinity is uniform over the finite logits.
        top_k: how many ids to keep; ``None`` keeps all.
        top_p: mass to keep, of what top-k kept.
        min_p: least probability to keep, as a share of the largest.

    Returns:
        ``[V]`` in the type of ``logits``, summing to 1.
    """
    logits = torch.where(logits.isnan(), -torch.inf, logits)
    best = logits.max()
    scaled = (logits - best) / temperature if temperature > 0 and best.isfinite() else None
    if scaled is None:
        return _one_hot(logits, int(logits.argmax()))
    # An infinite temperature levels what is finite, and leaves minus infinity where it is.
    p = scaled.where(logits > -torch.inf, -torch.inf).exp()
    p = p / p.sum()
    if top_k is None and top_p >= 1 and min_p <= 0:
        return p
    order = torch.sort(logits, descending=True, stable=True).indices
    if top_k is not None and top_k < len(p):
        p = _keep(p, order[:top_k])
    if top_p < 1:
        ranked = p[order]
        before = ranked.cumsum(0) - ranked
        p = _keep(p, order[before < top_p])
    if min_p > 0:
        p = _keep(p, order[p[order] >= min_p * p.max()])
    return p


def _one_hot(like: torch.Tensor, index: int) -> torch.Tensor:
    p = torch.zeros_like(like)
    p[index] = 1
    return p


def _keep(p: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """``p`` restricted to ``ids`` and renormalised; the largest is always kept."""
    ids = ids if len(ids) else p.argmax().reshape(1)
    kept = torch.zeros_like(p)
    kept[ids] = p[ids]
    return kept / kept.sum()


@dataclass(frozen=True)
class Proposal:
    """What the draft knows at a node: candidates, best first, and how its children were made.

    Attributes:
        ids: ``[C]`` int64 token ids, the draft's candidates in order of probability.
        q: ``[C]`` their probabilities; their sum need not be 1.
        fixed: how many of the first candidates are fixed children.
        children: token ids of the verified children in proposal order: a subset of the fixed ones,
            then the drawn ones as they were drawn.
    """

    ids: torch.Tensor
    q: torch.Tensor
    fixed: int
    children: tuple[int, ...]

    def drawn_from(self, drawn_before: tuple[int, ...]) -> torch.Tensor:
        """``[C]`` the distribution of the next drawn child, given those drawn before it.

        Where no probability is left, it is the next candidate in the list's order for certain.
        """
        taken = torch.isin(self.ids, torch.tensor(drawn_before, dtype=self.ids.dtype))
        taken[: self.fixed] = True
        left = self.q.where(~taken, 0)
        if left.sum() > 0:
            return left / left.sum()
        return _one_hot(left, int(taken.long().argmin())).where(~taken, 0)


def sibling_rule(p: torch.Tensor, proposal: Proposal) -> tuple[list[float], torch.Tensor]:
    """Chances of accepting each child when it is its turn, and what is drawn when all are rejected.

    Returns:
        The acceptance probability of each child given that those before it were rejected, and the
        residual distribution ``[V]`` (``p`` itself for a node without children; all zero if it is
        never reached).
    """
    fixed = set(proposal.ids[: proposal.fixed].tolist())
    drawn: tuple[int, ...] = ()
    chances: list[float] = []
    left = p
    for token in proposal.children:
        if token in fixed:
            proposed = _one_hot(p, token)
        else:
            proposed = torch.zeros_like(p)
            proposed[proposal.ids] = proposal.drawn_from(drawn).to(p.dtype)
            drawn = (*drawn, token)
        here = float(proposed[token])
        chances.append(min(1.0, float(left[token]) / here) if here > 0 else 0.0)
        rest = (left - proposed).clamp(min=0)
        left = rest / rest.sum() if rest.sum() > 0 else torch.zeros_like(rest)
    return chances, left


def greedy_proposal_acceptance(p: torch.Tensor, q: torch.Tensor, fixed: int) -> float:
    """Probability that a node with ``fixed`` fixed children and one drawn child accepts any.

    ``p(S) + sum over x outside S of min(p(x), (1 - p(S)) q(x) / (1 - q(S)))``, with ``S`` the
    ``fixed`` likeliest ids under ``q`` (``[V]``, the smaller id among equals).
    """
    order = torch.sort(q, descending=True, stable=True).indices
    inside, outside = order[:fixed], order[fixed:]
    p_in = p[inside].sum()
    drawn = q[outside] / q[outside].sum()
    return float(p_in + torch.minimum(p[outside], (1 - p_in) * drawn).sum())
