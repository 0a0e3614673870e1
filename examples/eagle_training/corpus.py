"""Documents which the target wrote: storage, repetition loops, token counts."""

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import load_file, save

from sgl_frspec.maps.files import atomic_file

_LONGEST_PERIOD = 48
_REPEATS = 3
_SHORTEST_LOOP = 24
_SHORTEST_REPLY = 4


@dataclass(frozen=True)
class Document:
    """One conversation: a context that was given and the reply that was generated."""

    tokens: list[int]
    context_length: int
    domain: str
    greedy: bool

    @property
    def reply(self) -> list[int]:
        """The generated tokens."""
        return self.tokens[self.context_length :]


def loop_starts(replies: list[list[int]], device: str = "cpu") -> list[int | None]:
    """Find where degenerate repetitions begin.

    A loop is a stretch of at least 24 tokens that repeats a period of up to 48 tokens three times.

    Returns:
        For each reply the index of its first repeated token, or None.
    """
    longest = max(map(len, replies), default=0)
    # Every position past the end differs from every other one, so no loop reaches beyond it.
    filler = range(-1, -1 - longest, -1)
    padded = np.array([[*r, *filler[len(r) :]] for r in replies], dtype=np.int32)
    ids = torch.from_numpy(padded).to(device)
    first = torch.full((len(replies),), longest, device=device)
    for period in range(1, min(_LONGEST_PERIOD, longest // 2) + 1):
        total = F.pad((ids[:, period:] == ids[:, :-period]).int().cumsum(1), (1, 0))
        length = max(_SHORTEST_LOOP, _REPEATS * period) - period
        run = total[:, length:] - total[:, :-length] == length
        if run.shape[1]:
            start = torch.where(run.any(1), run.int().argmax(1) + period, longest)
            first = torch.minimum(first, start)
    return [None if n == longest else n for n in first.tolist()]


def without_loops(documents: list[Document], device: str = "cpu") -> list[Document]:
    """Cut every document where its reply starts to loop; drop those with hardly any reply left."""
    kept = []
    starts = loop_starts([d.reply for d in documents], device)
    for document, start in zip(documents, starts, strict=True):
        length = len(document.reply) if start is None else start
        if length >= _SHORTEST_REPLY:
            tokens = document.tokens[: document.context_length + length]
            kept.append(replace(document, tokens=tokens))
    return kept


def reply_counts(documents: list[Document], vocab_size: int) -> torch.Tensor:
    """Count every token id in the replies: int64 ``[vocab_size]``."""
    replies = [np.asarray(d.reply, dtype=np.int64) for d in documents]
    flat = np.concatenate(replies) if replies else np.empty(0, np.int64)
    return torch.from_numpy(np.bincount(flat, minlength=vocab_size))


def save_documents(documents: list[Document], path: Path, vocab_size: int) -> None:
    """Write documents as flat token ids (uint16 if the vocabulary fits, else int32)."""
    dtype = torch.uint16 if vocab_size <= 1 << 16 else torch.int32
    flat = np.fromiter((t for d in documents for t in d.tokens), dtype=np.int64)
    domains = sorted({d.domain for d in documents})
    tensors = {
        "tokens": torch.from_numpy(flat).to(dtype),
        "lengths": torch.tensor([len(d.tokens) for d in documents], dtype=torch.int32),
        "context_lengths": torch.tensor([d.context_length for d in documents], dtype=torch.int32),
        "domains": torch.tensor([domains.index(d.domain) for d in documents], dtype=torch.uint8),
        "greedy": torch.tensor([d.greedy for d in documents], dtype=torch.uint8),
    }
    metadata = {"domains": ",".join(domains), "vocab": str(vocab_size)}
    with atomic_file(path) as file:
        file.write(save(tensors, metadata=metadata))


def load_documents(path: Path) -> list[Document]:
    """Read what :func:`save_documents` wrote."""
    with safe_open(path, "pt") as f:
        domains = f.metadata()["domains"].split(",")
    t = {name: tensor.tolist() for name, tensor in load_file(path).items()}
    ends = np.cumsum(t["lengths"]).tolist()
    return [
        Document(t["tokens"][end - n : end], c, domains[d], bool(g))
        for end, n, c, d, g in zip(
            ends, t["lengths"], t["context_lengths"], t["domains"], t["greedy"], strict=True
        )
    ]
