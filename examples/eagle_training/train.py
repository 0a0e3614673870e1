"""The training loop: the draft feeds itself for several steps, as it will when it drafts.

At step 0 the draft sees the target's hidden states. At step j it sees its own output of step j-1,
one position to the left; its attention reads step 0 up to j positions back and then its own
earlier steps on the diagonal, which is exactly a chain of j drafted tokens (HASS,
arXiv:2408.15766; EAGLE-3's training-time test, arXiv:2503.01840).
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from tqdm import tqdm

from examples.eagle_training.features import Batch, TrainingSet
from examples.eagle_training.loss import head_loss
from examples.eagle_training.model import EagleDraft
from examples.eagle_training.tree import Shared
from sgl_frspec.maps.files import atomic_file


@dataclass(frozen=True)
class TrainSettings:
    """Settings of one training run; the clock, not the epochs, ends it."""

    seconds: float
    tokens_per_batch: int = 1 << 15
    steps: int = 4
    step_decay: float = 0.8
    learning_rate: float = 1e-3
    warmup_batches: int = 50
    weight_decay: float = 0.01
    clip: float = 0.5
    feature_noise: float = 0.05
    feature_weight: float = 0.1
    greedy_share: float = 0.5
    seed: int = 0
    seconds_between_checks: float = 30.0


def unroll_mask(length: int, step: int, device: torch.device) -> torch.Tensor:
    """Keys that each query of drafting step ``step`` reads: bool ``[L, (step + 1) * L]``.

    Block 0 holds the target-fed keys, block s the keys of drafting step s.
    """
    offset = torch.arange(length, device=device)
    back = offset[:, None] - offset[None, :]
    blocks = [back >= step, *(back == step - s for s in range(1, step + 1))]
    return torch.cat(blocks, dim=1)


def unroll(
    draft: EagleDraft,
    embedding: torch.Tensor,
    tokens: torch.Tensor,
    hidden: torch.Tensor,
    steps: int,
) -> torch.Tensor:
    """Run ``steps`` self-feeding passes.

    Args:
        draft: the draft.
        embedding: ``[V, H]`` the target's.
        tokens: ``[B, L]`` token i+1 at index i.
        hidden: ``[B, L, H]`` the target's hidden state of token i at index i.
        steps: J, number of passes.

    Returns:
        ``[J, B, L, H]``; entry (j, i) predicts the target's hidden state of token i+1 after j
        drafted tokens before it.
    """
    length = tokens.shape[1]
    positions = torch.arange(length, device=tokens.device)[None]
    embedded = F.embedding(tokens, embedding)
    attention = draft.layer.self_attn
    keys: list[torch.Tensor] = []
    values: list[torch.Tensor] = []
    outputs: list[torch.Tensor] = []
    for step in range(steps):
        x = draft.mix(embedded, hidden)
        query, key, value = attention.project(x, positions)
        keys.append(key)
        values.append(value)
        mask = unroll_mask(length, step, tokens.device)
        attended = attention(query, torch.cat(keys, 2), torch.cat(values, 2), mask)
        outputs.append(draft.finish(x, attended))
        hidden = F.pad(outputs[-1][:, :-1], (0, 0, 1, 0))
    return torch.stack(outputs)


class LossParts:
    """The loss of one batch and what to log of it."""

    def __init__(
        self,
        draft: EagleDraft,
        shared: Shared,
        batch: Batch,
        settings: TrainSettings,
    ) -> None:
        head = shared.head
        seen, wanted = batch.features[:, :-1], batch.features[:, 1:]
        spread = settings.feature_noise * seen.float().std()
        noise = (torch.rand_like(seen) * 2 - 1) * spread.to(seen.dtype)
        drafted = unroll(draft, shared.embedding, batch.tokens[:, 1:], seen + noise, settings.steps)
        index = torch.arange(seen.shape[1], device=seen.device)
        used = (index >= batch.first[:, None]) & (index <= batch.lengths[:, None] - 3)
        depth = torch.arange(settings.steps, device=seen.device)
        weights = (index - batch.first[:, None])[used] >= depth[:, None]
        chosen = drafted[:, used].to(head.dtype)
        target = wanted[used].to(head.dtype)
        result = head_loss(chosen, target, weights.float(), head, settings.greedy_share)
        count = weights.sum(1).clamp(min=1)
        self.cross_entropy = result.loss / count
        self.accuracy = result.hits / count
        distance = F.smooth_l1_loss(
            chosen.float(), target.float().expand_as(chosen), reduction="none"
        )
        self.distance = (distance.mean(-1) * weights).sum(1) / count
        decay = settings.step_decay**depth
        each = self.cross_entropy + settings.feature_weight * self.distance
        self.total = (each * decay).sum() / decay.sum()


class Trainer:
    """Training that can be interrupted: its state lives in ``folder``."""

    def __init__(
        self, draft: EagleDraft, settings: TrainSettings, folder: Path, log: Callable[..., None]
    ) -> None:
        self.draft, self.settings, self.log = draft, settings, log
        self.optimizer = torch.optim.AdamW(
            draft.parameters(),
            lr=settings.learning_rate,
            betas=(0.9, 0.95),
            weight_decay=settings.weight_decay,
        )
        self.elapsed, self.batches, self.epoch, self.best = 0.0, 0, 0, -math.inf
        folder.mkdir(parents=True, exist_ok=True)
        self._state = folder / "trainer.pt"
        if self._state.is_file():
            self._load()

    def _load(self) -> None:
        state = torch.load(self._state, weights_only=True)
        self.draft.load_state_dict(state["draft"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.elapsed, self.batches, self.epoch, self.best = state["progress"]

    def _save(self) -> None:
        progress = (self.elapsed, self.batches, self.epoch + 1, self.best)
        state = {
            "draft": self.draft.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "progress": progress,
        }
        with atomic_file(self._state) as file:
            torch.save(state, file)

    def _rate(self) -> float:
        progress = min(1.0, self.elapsed / self.settings.seconds)
        warmup = min(1.0, (self.batches + 1) / self.settings.warmup_batches)
        cosine = 0.5 * (1 + math.cos(math.pi * progress))
        return self.settings.learning_rate * warmup * max(cosine, 0.02)

    def step(self, batch: Batch, shared: Shared) -> LossParts:
        """Update the draft on one batch."""
        with torch.autocast(batch.tokens.device.type, dtype=torch.bfloat16):
            parts = LossParts(self.draft, shared, batch, self.settings)
        self.optimizer.zero_grad(set_to_none=True)
        parts.total.backward()
        torch.nn.utils.clip_grad_norm_(self.draft.parameters(), self.settings.clip)
        for group in self.optimizer.param_groups:
            group["lr"] = self._rate()
        self.optimizer.step()
        self.batches += 1
        return parts

    def run(
        self,
        data: TrainingSet,
        shared: Shared,
        check: Callable[[EagleDraft], float],
        keep: Callable[[EagleDraft], None],
    ) -> None:
        """Train until the time is up.

        Args:
            data: the training documents.
            shared: the target's embedding and whole head.
            check: scores a draft on documents outside the training set; more is better.
            keep: stores the best draft so far.
        """
        torch.manual_seed(self.settings.seed + self.epoch)
        bar = tqdm(
            total=round(self.settings.seconds), desc="train", unit="s", initial=round(self.elapsed)
        )
        start = time.monotonic() - self.elapsed
        next_check = self.elapsed + self.settings.seconds_between_checks
        while self.elapsed < self.settings.seconds:
            for batch in data.epoch(
                self.settings.tokens_per_batch, self.settings.seed + self.epoch
            ):
                parts = self.step(batch, shared)
                # Reading one number a batch also keeps the host from running ahead of the clock.
                bar.set_postfix(loss=f"{parts.total.item():.3f}", epoch=self.epoch, refresh=False)
                self.elapsed = time.monotonic() - start
                bar.update(min(bar.total, round(self.elapsed)) - bar.n)
                if self.elapsed >= next_check or self.elapsed >= self.settings.seconds:
                    self.checkpoint(parts, check, keep)
                    next_check = self.elapsed + self.settings.seconds_between_checks
                if self.elapsed >= self.settings.seconds:
                    break
            self.epoch += 1
        bar.close()

    def checkpoint(
        self,
        parts: LossParts,
        check: Callable[[EagleDraft], float],
        keep: Callable[[EagleDraft], None],
    ) -> None:
        """Score the draft, log it with the last batch's figures, and store what a restart needs."""
        score = check(self.draft)
        self.log(
            event="check",
            seconds=round(self.elapsed, 1),
            batches=self.batches,
            epoch=self.epoch,
            learning_rate=self._rate(),
            loss=parts.total.item(),
            cross_entropy=[round(x, 4) for x in parts.cross_entropy.tolist()],
            distance=[round(x, 4) for x in parts.distance.tolist()],
            accuracy=[round(x, 4) for x in parts.accuracy.tolist()],
            accept_length=score,
        )
        tqdm.write(
            f"{self.elapsed:6.0f} s  {self.batches} batches  accuracy by depth "
            f"{[round(x, 3) for x in parts.accuracy.tolist()]}  held-out accept length {score:.3f}"
        )
        if score > self.best:
            self.best = score
            keep(self.draft)
        self._save()
