"""The target's last hidden states for every document, in batches of similar length."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from tqdm import tqdm

from examples.eagle_training.corpus import Document

_LENGTH_STEP = 64
_TARGET_TOKENS = 1 << 16


class Batch(NamedTuple):
    """Documents of one padded length."""

    tokens: torch.Tensor  # [B, L] int64
    features: torch.Tensor  # [B, L, H], the target's hidden states after its final norm
    first: torch.Tensor  # [B] int64, position of the last context token
    lengths: torch.Tensor  # [B] int64


@torch.no_grad()
def target_features(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Return the last hidden states ``[B, L, H]`` of right-padded tokens ``[B, L]``.

    Attention is causal, so padding on the right changes nothing before it.
    """
    return model.model(input_ids=tokens, use_cache=False).last_hidden_state


class TrainingSet:
    """All documents with their features, in memory of the target's device."""

    def __init__(self, model: Any, documents: list[Document]) -> None:
        """Run the target over all documents.

        Raises:
            ValueError: there are none.
        """
        if not documents:
            raise ValueError("no documents to train on; give the target more time to write them")
        model.set_attn_implementation("sdpa")
        buckets: dict[int, list[Document]] = {}
        for document in documents:
            padded = -(-len(document.tokens) // _LENGTH_STEP) * _LENGTH_STEP
            buckets.setdefault(padded, []).append(document)
        bar = tqdm(total=len(documents), desc="features", unit="doc", mininterval=2)
        self._buckets = [_fill(model, n, buckets[n], bar) for n in sorted(buckets)]
        bar.close()

    def epoch(self, tokens_per_batch: int, seed: int) -> Iterator[Batch]:
        """Yield every document once, in an order that depends on ``seed`` only."""
        order = torch.Generator().manual_seed(seed)
        plan: list[tuple[Batch, torch.Tensor]] = []
        for bucket in self._buckets:
            count, length = bucket.tokens.shape
            rows = torch.randperm(count, generator=order)
            plan += [(bucket, r) for r in rows.split(max(1, tokens_per_batch // length))]
        for i in torch.randperm(len(plan), generator=order).tolist():
            bucket, rows = plan[i]
            rows = rows.to(bucket.tokens.device)
            yield Batch(*(t[rows] for t in bucket))


def _fill(model: Any, length: int, documents: list[Document], bar: tqdm) -> Batch:
    padded = [d.tokens + [0] * (length - len(d.tokens)) for d in documents]
    tokens = torch.tensor(padded, device=model.device)
    parts = []
    for part in tokens.split(max(1, _TARGET_TOKENS // length)):
        parts.append(target_features(model, part))
        bar.update(len(part))
    first = torch.tensor([d.context_length - 1 for d in documents], device=model.device)
    lengths = torch.tensor([len(d.tokens) for d in documents], device=model.device)
    return Batch(tokens, torch.cat(parts), first, lengths)
