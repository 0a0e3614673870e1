"""Growing the token tree of a round: FRSPEC's kernels, their CPU references, or SGLang's own code.

Each of the three takes the proposals of one draft step after another, says what the next step runs
on, and ends with three tensors of which its own builder makes the tree.
"""

from typing import Any, Protocol

import torch
from sglang.srt.speculative.eagle_utils import organize_draft_results
from sglang.srt.speculative.spec_utils import select_top_k_tokens
from torch import Tensor

from frspec_kernels.tree import (
    Beams,
    Candidates,
    TreeShape,
    empty_candidates,
    grow_tree,
)
from frspec_kernels.tree_reference import grow_tree_reference


class TreeGrowth(Protocol):
    """One round's tree while the draft runs."""

    def grow(self, step: int, probs: Tensor, token_ids: Tensor, hidden: Tensor) -> Beams | None:
        """Take the proposals of ``step``; what the next draft step runs on, None after the last.

        ``probs`` and ``token_ids`` are ``[B, K]`` at step 0, then ``[B * K, K]``; ``hidden`` has
        the row that each of their rows came from.
        """
        ...

    def finish(self) -> tuple[Tensor, Tensor, Tensor]:
        """What the builder needs. The first dimension of each is the batch."""
        ...


class KernelGrowth:
    """With :mod:`frspec_kernels.tree`; ends with the fields of ``Candidates``."""

    def __init__(self, shape: TreeShape, batch: int, device: torch.device) -> None:
        self.shape = shape
        self.candidates: Candidates = empty_candidates(shape, batch, device)

    def grow(self, step: int, probs: Tensor, token_ids: Tensor, hidden: Tensor) -> Beams | None:
        """See :class:`TreeGrowth`."""
        if probs.device.type == "cpu":
            return grow_tree_reference(self.candidates, self.shape, step, probs, token_ids, hidden)
        return grow_tree(self.candidates, self.shape, step, probs, token_ids, hidden=hidden)

    def finish(self) -> tuple[Tensor, Tensor, Tensor]:
        """Scores, tokens and parents of all candidates."""
        scores, tokens, parents = self.candidates
        return scores, tokens, parents


class StockGrowth:
    """With SGLang's functions; ends with its parents, its selection and the selected tokens."""

    def __init__(self, shape: TreeShape) -> None:
        self.shape = shape
        self._scores: Any = None
        self._lists: tuple[list[Any], list[Any], list[Any]] = ([], [], [])

    def grow(self, step: int, probs: Tensor, token_ids: Tensor, hidden: Tensor) -> Beams | None:
        """See :class:`TreeGrowth`."""
        tokens, rows, self._scores, tree_info = select_top_k_tokens(
            step, probs, token_ids, hidden, self._scores, self.shape.top_k
        )
        for found, new in zip(self._lists, tree_info, strict=True):
            found.append(new)
        return None if step == self.shape.steps - 1 else Beams(tokens, tokens, rows)

    def finish(self) -> tuple[Tensor, Tensor, Tensor]:
        """Parents, selected candidates and their tokens."""
        return organize_draft_results(*self._lists, self.shape.nodes)
