"""The straight line of cycle time against the draft's vocabulary, and whether it has a slope."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sgl_frspec.explain import VocabularyLine, vocabulary_line

SIGNIFICANT = 0.01


@dataclass(frozen=True)
class Fit:
    """A least-squares line, with the two-sided probability of its slope by chance.

    Attributes:
        line: ``a + b V`` in seconds.
        slope_error_s: standard error of b.
        p_value: probability of a slope at least as far from zero if there were none, by Student's
            t with two degrees of freedom less than there are points.
    """

    line: VocabularyLine
    slope_error_s: float
    p_value: float

    @property
    def significant(self) -> bool:
        """Whether the vocabulary matters, at the 1% level."""
        return self.p_value < SIGNIFICANT

    def as_json(self, vocab: int) -> dict[str, Any]:
        """Numbers of the line, and the most that any map can gain over ``vocab`` ids."""
        return vars(self.line) | {
            "slope_error_s": self.slope_error_s,
            "p_value": self.p_value,
            "ceiling": self.line.ceiling(vocab),
        }


def fit(vocabs: Sequence[int], seconds: Sequence[float]) -> Fit:
    """The line through (draft vocabulary, seconds per cycle).

    Raises:
        ValueError: with fewer than three different vocabularies, where no error can be estimated.
    """
    if len(set(vocabs)) < 3:
        raise ValueError(f"a fit needs three different vocabularies, not {list(vocabs)}")
    line = vocabulary_line(vocabs, seconds)
    freedom = len(vocabs) - 2
    residual = sum((y - line.seconds(x)) ** 2 for x, y in zip(vocabs, seconds, strict=True))
    mean = sum(vocabs) / len(vocabs)
    spread = sum((x - mean) ** 2 for x in vocabs)
    error = math.sqrt(residual / freedom / spread)
    if error == 0:
        return Fit(line, 0.0, 0.0 if line.per_token_s else 1.0)
    return Fit(line, error, two_sided(line.per_token_s / error, freedom))


def two_sided(t: float, freedom: int) -> float:
    """P(|T| >= |t|) of Student's t distribution with whole degrees of freedom.

    The finite sums of Abramowitz and Stegun, 26.7.3 and 26.7.4.
    """
    angle = math.atan(abs(t) / math.sqrt(freedom))
    sine, cosine = math.sin(angle), math.cos(angle)
    term, total = 1.0, 0.0
    if freedom % 2:
        term = cosine
        for i in range(1, (freedom - 1) // 2 + 1):
            total += term
            term *= cosine**2 * 2 * i / (2 * i + 1)
        inside = 2 / math.pi * (angle + sine * total)
    else:
        for i in range(1, freedom // 2 + 1):
            total += term
            term *= cosine**2 * (2 * i - 1) / (2 * i)
        inside = sine * total
    return min(1.0, max(0.0, 1 - inside))
