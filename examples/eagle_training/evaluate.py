"""Accept length of tree drafting over whole greedy replies.

Greedy verification accepts exactly the tokens of the target's own greedy reply, so a reply and its
hidden states, made once, tell what every tree would have gained.
"""

from dataclasses import dataclass
from typing import Any

import torch

from examples.eagle_training.corpus import Document
from examples.eagle_training.features import target_features
from examples.eagle_training.model import EagleDraft
from examples.eagle_training.tree import Shared, TreeShape, accepted, grow, read_prefix


@dataclass
class Cycles:
    """Draft-and-verify cycles of one reply."""

    domain: str
    accept_lengths: list[int]


class ReplySet:
    """Greedy replies with the target's hidden states, padded to one length."""

    def __init__(self, model: Any, documents: list[Document], reply_tokens: int) -> None:
        """Keep ``reply_tokens`` tokens of each reply; the rest only completes the last cycle."""
        model.set_attn_implementation("sdpa")
        self.documents = documents
        longest = max(len(d.tokens) for d in documents)
        padded = [d.tokens + [-1] * (longest + 8 - len(d.tokens)) for d in documents]
        self.tokens = torch.tensor(padded, device=model.device)
        known = self.tokens.clamp(min=0)
        self.features = torch.cat([target_features(model, t) for t in known.split(64)])
        starts = torch.tensor([d.context_length for d in documents], device=model.device)
        replies = torch.tensor([len(d.reply) for d in documents], device=model.device)
        self.starts, self.ends = starts, starts + replies.clamp(max=reply_tokens)


@torch.no_grad()
def accept_lengths(
    draft: EagleDraft, shared: Shared, replies: ReplySet, shape: TreeShape
) -> list[Cycles]:
    """Walk every reply cycle by cycle.

    Args:
        draft: in the dtype of the target's hidden states.
        shared: embedding, head (cut to the map) and map.
        replies: the target's greedy replies.
        shape: the draft tree.

    Returns:
        One entry a reply; each cycle counts accepted drafts + 1 bonus token.
    """
    tokens, ends = replies.tokens, replies.ends
    prefix = read_prefix(
        draft, shared.embedding, tokens[:, 1:].clamp(min=0), replies.features[:, :-1]
    )
    rows = torch.arange(len(tokens), device=tokens.device)[:, None]
    ahead = torch.arange(1, shape.steps + 1, device=tokens.device)
    # The first reply token comes with the prefill: it is the first cycle's bonus token.
    committed = replies.starts.clone()
    history: list[tuple[torch.Tensor, torch.Tensor]] = []
    while bool((running := committed < ends - 1).any()):
        here = torch.where(running, committed, replies.starts)
        tree = grow(draft, shared, prefix, here, shape)
        wanted = tokens[rows, (here[:, None] + ahead).clamp(max=tokens.shape[1] - 1)]
        gained = accepted(tree, wanted) + 1
        history.append((running, gained))
        committed = torch.where(running, committed + gained, committed)
    running, gained = (torch.stack(t, dim=1).tolist() for t in zip(*history, strict=True))
    return [
        Cycles(d.domain, [g for r, g in zip(run, gain, strict=True) if r])
        for d, run, gain in zip(replies.documents, running, gained, strict=True)
    ]


def mean_by_domain(cycles: list[Cycles]) -> dict[str, float]:
    """Mean accept length over all cycles, by domain and under ``all``."""
    groups: dict[str, list[int]] = {}
    for reply in cycles:
        groups.setdefault(reply.domain, []).extend(reply.accept_lengths)
        groups.setdefault("all", []).extend(reply.accept_lengths)
    return {name: sum(g) / len(g) for name, g in sorted(groups.items()) if g}


def before(cycles: list[Cycles], limits: list[int | None]) -> list[Cycles]:
    """Keep the cycles that start before a reply's limit, counted in reply tokens; None keeps all.

    A reply's first token comes with the prefill, so its first cycle starts at 1.
    """
    kept = []
    for reply, limit in zip(cycles, limits, strict=True):
        starts = [1 + sum(reply.accept_lengths[:i]) for i in range(len(reply.accept_lengths))]
        lengths = [
            n
            for n, start in zip(reply.accept_lengths, starts, strict=True)
            if limit is None or start < limit
        ]
        kept.append(Cycles(reply.domain, lengths))
    return kept


def outside_share(documents: list[Document], token_map: torch.Tensor) -> float:
    """Share of reply tokens that the map does not hold."""
    reply = torch.tensor([t for d in documents for t in d.reply])
    return 1 - torch.isin(reply, token_map.cpu()).float().mean().item()
