"""The draft's LM head: the hot rows of the target's, gathered once."""

from typing import Any

import torch


def gather_head(head: Any, hot_ids: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """The rows ``hot_ids`` of the target's head, as a new tensor of only that size.

    Args:
        head: the target's head or tied embedding, floating point ``[rows >= vocab_size, hidden]``.
        hot_ids: int64 ``[K]``, on the head's device.
        vocab_size: tokens of the target; rows past it are padding.

    Returns:
        ``[K, hidden]`` in the head's type.

    Raises:
        ValueError: the head is missing, quantised, or has fewer rows than the vocabulary.
    """
    if not isinstance(head, torch.Tensor) or head.dim() != 2 or not head.is_floating_point():
        found = "no head" if head is None else f"a head of {getattr(head, 'dtype', type(head))}"
        raise ValueError(
            f"the target gives {found}; FRSPEC gathers rows of an unquantised head (bf16, fp16 or"
            " fp32). Exclude lm_head from quantisation, or use --speculative-algorithm EAGLE"
        )
    if head.shape[0] < vocab_size:
        raise ValueError(
            f"the target's head has {head.shape[0]} rows for {vocab_size} tokens: it is one shard"
            " of several; FRSPEC needs the whole head on one GPU"
        )
    with torch.no_grad():
        return head.index_select(0, hot_ids)


def share_embedding_and_head(draft: Any, embedding: Any, head: torch.Tensor) -> int:
    """Give the draft model the target's embedding and the reduced ``head``.

    Returns the bytes of the draft's own tables, which nothing holds any more.

    A draft whose configuration ties its head to its embedding has one module for both; it gets a
    head of its own first, since the two now differ.
    """
    own = {w.data_ptr(): w.nbytes for w in (draft.model.embed_tokens.weight, draft.lm_head.weight)}
    own.pop(embedding.data_ptr(), None)
    if draft.lm_head is draft.model.embed_tokens:
        draft.lm_head = torch.nn.Linear(*reversed(head.shape), bias=False, device="meta")
    draft.set_embed_and_head(embedding, head)
    return sum(own.values())
