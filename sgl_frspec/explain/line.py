"""Time per cycle as a straight line in the draft vocabulary."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class VocabularyLine:
    """``seconds = fixed_s + per_token_s * V``, with the share of variance that it explains."""

    fixed_s: float
    per_token_s: float
    r_squared: float

    def seconds(self, vocab: int) -> float:
        """Predicted time of a cycle that drafts over ``vocab`` ids."""
        return self.fixed_s + self.per_token_s * vocab

    def ceiling(self, vocab: int) -> float:
        """Speed-up over ``vocab`` ids that not even a map of no ids would exceed."""
        return self.seconds(vocab) / self.fixed_s


def vocabulary_line(vocabs: Sequence[int], seconds: Sequence[float]) -> VocabularyLine:
    """Least-squares line through (draft vocabulary, seconds per cycle).

    Raises:
        ValueError: with fewer than two different vocabularies.
    """
    if len(set(vocabs)) < 2:
        raise ValueError(f"a line needs two different vocabularies, not {list(vocabs)}")
    x, y = np.asarray(vocabs, dtype=np.float64), np.asarray(seconds, dtype=np.float64)
    slope, fixed = np.polyfit(x, y, 1)
    spread = float(np.square(y - y.mean()).sum())
    residual = float(np.square(y - (fixed + slope * x)).sum())
    return VocabularyLine(float(fixed), float(slope), 1 - residual / spread if spread else 1.0)
