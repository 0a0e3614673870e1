"""Decode many contexts in one continuous batch.

Every row of the batch reads its context token by token, then continues it, and takes the next
context as soon as it is done. All rows write the same slot of a ring of keys and values, so there
is no padding, no prefill and no host synchronisation inside the loop.

R rows, N documents, W slots of the ring (= the longest document), V vocabulary.
"""

import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from tqdm import tqdm
from transformers import AttentionInterface

_STEPS_BETWEEN_SYNCS = 32


@dataclass(frozen=True)
class DecodeSettings:
    """How to continue the contexts.

    ``min_p`` drops tokens whose probability is below ``min_p`` times the best one's. A document
    ends with one of ``stop_ids`` or at ``max_length`` tokens, its context included.
    """

    stop_ids: tuple[int, ...]
    max_length: int
    rows: int
    min_p: float = 0.05
    seed: int = 0
    seconds: float = float("inf")


def grouped_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor,
    scaling: float,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Attend with one query token a row, without repeating keys for their query heads.

    Args:
        module: the calling layer (unused; part of the interface).
        query: ``[R, heads, 1, D]``.
        key: ``[R, kv_heads, W, D]``; ``value`` likewise.
        attention_mask: ``[R, 1, 1, W]``, added to the scores (see :func:`ring_masks`).
        scaling: factor of the scores.
    """
    del module
    rows, heads, _length, dim = query.shape
    # The query heads of one key head become queries of one head, so keys are read once for all.
    grouped = query.reshape(rows, key.shape[1], -1, dim)
    mask = attention_mask.expand(rows, key.shape[1], grouped.shape[2], -1)
    with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
        out = F.scaled_dot_product_attention(grouped, key, value, attn_mask=mask, scale=scaling)
    return out.reshape(rows, 1, heads, dim), None


AttentionInterface.register("grouped_ring", grouped_attention)


class RingCache:
    """Keys and values of the last ``window`` steps of every layer."""

    def __init__(self, window: int) -> None:
        self.window = window
        self.slot = 0
        self._layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Positions are given explicitly, so no length is kept."""
        return 0

    def update(
        self, key: torch.Tensor, value: torch.Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write ``[R, kv_heads, 1, D]`` to the current slot and return the whole ring."""
        if layer_idx not in self._layers:
            # Zeros, not empty: masked slots still meet a probability of zero in the product.
            shape = (*key.shape[:2], self.window, key.shape[3])
            self._layers[layer_idx] = key.new_zeros(shape), value.new_zeros(shape)
        keys, values = self._layers[layer_idx]
        keys[:, :, self.slot] = key[:, :, 0]
        values[:, :, self.slot] = value[:, :, 0]
        return keys, values


def ring_masks(
    positions: torch.Tensor, slot: int, window: int, config: Any, dtype: torch.dtype
) -> torch.Tensor | dict[str, torch.Tensor]:
    """Slots each row may read: those written since its document began, by kind of layer.

    Args:
        positions: ``[R]`` int64, position in its document of the token being read now.
        slot: the slot being written now.
        window: slots of the ring.
        config: the target's configuration; models with sliding layers get one mask a kind.
        dtype: of the scores the mask is added to.

    Returns:
        ``[R, 1, 1, W]``, 0 where a slot may be read and -inf elsewhere, once for all layers.
    """
    age = (slot - torch.arange(window, device=positions.device)) % window
    full = age <= positions[:, None]

    def added(readable: torch.Tensor) -> torch.Tensor:
        zeros = torch.zeros(readable.shape, dtype=dtype, device=readable.device)
        return zeros.masked_fill(~readable, float("-inf"))[:, None, None, :]

    if "sliding_attention" not in (getattr(config, "layer_types", None) or ()):
        return added(full)
    recent = full & (age < config.sliding_window)
    return {"full_attention": added(full), "sliding_attention": added(recent)}


def pick_tokens(
    logits: torch.Tensor, temperatures: torch.Tensor, min_p: float, generator: torch.Generator
) -> torch.Tensor:
    """Sample one token a row by the Gumbel trick; a temperature of 0 is greedy.

    Args:
        logits: ``[R, V]`` float32, overwritten.
        temperatures: ``[R]`` float32.
        min_p: smallest probability kept, relative to the best.
        generator: source of randomness on the same device.
    """
    best = logits.amax(dim=1)
    floor = best + temperatures * torch.log(torch.tensor(min_p, device=logits.device))
    logits.masked_fill_(logits < floor[:, None], float("-inf"))
    noise = torch.empty_like(logits).exponential_(generator=generator).log_().neg_()
    return logits.add_(noise.mul_(temperatures[:, None])).argmax(dim=1)


class _Batch:
    """Which document each row holds; every update stays on the device."""

    def __init__(self, contexts: list[list[int]], settings: DecodeSettings, device: str) -> None:
        n, longest = len(contexts), max(map(len, contexts))
        # Document N is a stand-in for rows without work.
        padded = [c + [0] * (longest - len(c)) for c in [*contexts, [0]]]
        self.contexts = torch.tensor(padded, device=device)
        self.context_lengths = torch.tensor([*map(len, contexts), 1], device=device)
        self.documents = self.contexts.new_zeros((n + 1, settings.max_length))
        self.lengths = self.contexts.new_zeros(n + 1)
        rows = min(settings.rows, n)
        self.document = torch.arange(rows, device=device)
        self.next_document = torch.tensor(rows, device=device)
        self.position = self.contexts.new_zeros(rows)
        self.token = self.contexts[self.document, 0]
        self.documents[self.document, 0] = self.token
        self._stop = torch.tensor(settings.stop_ids, device=device)
        self._spare = n

    def advance(self, picked: torch.Tensor) -> None:
        """Append one token to every row; start new documents in the rows that ended."""
        position = self.position + 1
        forced = position < self.context_lengths[self.document]
        given = self.contexts[self.document, position.clamp(max=self.contexts.shape[1] - 1)]
        token = torch.where(forced, given, picked)
        self.documents[self.document, position] = token
        ended = ~forced & torch.isin(token, self._stop)
        ended |= (position + 1 >= self.documents.shape[1]) | (self.document == self._spare)
        self.lengths[self.document] = torch.where(ended, position + 1, 0)
        fresh = self.next_document + ended.cumsum(0) - 1
        self.document = torch.where(ended, fresh.clamp(max=self._spare), self.document)
        self.next_document = (self.next_document + ended.sum()).clamp(max=self._spare)
        self.position = torch.where(ended, 0, position)
        self.token = torch.where(ended, self.contexts[self.document, 0], token)
        self.documents[self.document, self.position] = self.token

    def cut_off(self) -> None:
        """Count what the rows hold as documents: all but the token that was not read yet."""
        self.lengths[self.document] = self.position + 1


@torch.inference_mode()
def continue_all(
    model: Any, contexts: list[list[int]], temperatures: list[float], settings: DecodeSettings
) -> list[list[int]]:
    """Continue every context until it stops.

    Args:
        model: a Hugging Face causal language model; its attention is switched to the ring's.
        contexts: N lists of token ids, each non-empty and shorter than ``max_length``.
        temperatures: N values; 0 is greedy.
        settings: see :class:`DecodeSettings`.

    Returns:
        N documents, context included. Where the time ran out they are cut off, or empty.

    Raises:
        ValueError: no contexts, or one that is empty or leaves no room.
    """
    if not contexts:
        raise ValueError("there is no context to continue")
    for i, context in enumerate(contexts):
        if not 0 < len(context) < settings.max_length:
            raise ValueError(
                f"context {i} has {len(context)} tokens; 1 to {settings.max_length - 1} are allowed"
            )
    device = model.device
    model.set_attn_implementation("grouped_ring")
    generator = torch.Generator(device).manual_seed(settings.seed)
    heat = torch.tensor([*temperatures, 0.0], device=device)
    batch = _Batch(contexts, settings, device)
    cache = RingCache(settings.max_length)
    deadline = time.monotonic() + settings.seconds
    bar = tqdm(total=len(contexts), desc="decode", unit="doc", mininterval=2)
    step = 0
    while step % _STEPS_BETWEEN_SYNCS or _work_left(batch, bar, deadline):
        cache.slot = step % cache.window
        hidden = model.model(
            input_ids=batch.token[:, None],
            position_ids=batch.position[:, None],
            attention_mask=ring_masks(
                batch.position, cache.slot, cache.window, model.config, model.dtype
            ),
            past_key_values=cache,
            use_cache=True,
        ).last_hidden_state
        logits = model.lm_head(hidden[:, 0]).float()
        batch.advance(pick_tokens(logits, heat[batch.document], settings.min_p, generator))
        step += 1
    bar.close()
    batch.cut_off()
    lengths = batch.lengths.tolist()
    documents = batch.documents.cpu().numpy()
    return [documents[i, : lengths[i]].tolist() for i in range(len(contexts))]


def _work_left(batch: _Batch, bar: tqdm, deadline: float) -> bool:
    bar.update(int((batch.lengths[:-1] > 0).sum()) - bar.n)
    return bool((batch.document < len(batch.documents) - 1).any()) and time.monotonic() < deadline
