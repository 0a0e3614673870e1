"""Accept length against the size of the token map."""

import sys
from collections.abc import Sequence
from typing import Any

import torch

from examples.eagle_training.corpus import Document, loop_starts
from examples.eagle_training.evaluate import (
    ReplySet,
    accept_lengths,
    before,
    mean_by_domain,
    outside_share,
)
from examples.eagle_training.model import EagleDraft
from examples.eagle_training.tree import Shared, TreeShape

REPLY_TOKENS = 128


def shared_with(model: Any, token_map: torch.Tensor | None = None) -> Shared:
    """Embedding and head of the target for its draft, the head cut to ``token_map``.

    The embedding is the stored one, as SGLang shares it: without the factor that some targets
    apply to it (see :func:`examples.eagle_training.model.save_draft`).
    """
    embedding = model.get_input_embeddings().weight.detach()
    head = model.get_output_embeddings().weight.detach()
    if token_map is None:
        return Shared(embedding, head, None)
    token_map = token_map.sort().values.to(head.device)
    return Shared(embedding, head[token_map], token_map)


def accept_by_size(
    model: Any,
    draft: EagleDraft,
    replies: ReplySet,
    ranked: torch.Tensor,
    sizes: Sequence[int],
) -> dict[str, dict[str, float]]:
    """Mean accept length by vocabulary size and domain.

    Args:
        model: the target.
        draft: in the target's dtype.
        replies: the target's greedy replies.
        ranked: token ids in rank order, the whole vocabulary.
        sizes: of the map; the length of ``ranked`` drafts over everything.

    Returns:
        By size. Beside the domains ``before_loops``, over all replies up to where they begin to
        repeat themselves, and ``outside``, the share of reply tokens that the map lacks.
    """
    loops = loop_starts([d.reply for d in replies.documents])
    table: dict[str, dict[str, float]] = {}
    for size in sizes:
        token_map = None if size == len(ranked) else ranked[:size]
        cycles = accept_lengths(draft, shared_with(model, token_map), replies, TreeShape())
        row = mean_by_domain(cycles)
        row["before_loops"] = mean_by_domain(before(cycles, loops))["all"]
        row["outside"] = outside_share(replies.documents, ranked[:size])
        table[str(size)] = {k: round(v, 4) for k, v in row.items()}
        print(size, table[str(size)], file=sys.stderr, flush=True)
    return table


def loop_share(documents: list[Document]) -> float:
    """Share of the counted reply tokens that only repeat what stands before them."""
    replies = [d.reply[:REPLY_TOKENS] for d in documents]
    starts = loop_starts(replies)
    looped = sum(len(r) - s for r, s in zip(replies, starts, strict=True) if s is not None)
    return looped / sum(map(len, replies))
