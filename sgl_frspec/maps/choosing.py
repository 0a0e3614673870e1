"""Which size of map is fastest: the time of a cycle against what the size costs in accept length.

A cycle that drafts over V ids takes ``fixed + slope · V`` (see
:mod:`sgl_frspec.explain.line`) and yields the accept length ``1 + p + p² + … + p^S`` for S draft
steps, where p is the chance that a step's token is accepted. A token outside the map is never
accepted, so ``p = a · coverage(V)``; the ratio a is what the accept lengths measured at a few sizes
say at those sizes, and is interpolated between them.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from sgl_frspec.explain.line import VocabularyLine, vocabulary_line
from sgl_frspec.maps.token_map import TokenMapError

Coverage = Callable[[int], float]
# Sizes whose speed is this close to the best are not told apart by a measurement.
FLAT = 0.01


@dataclasses.dataclass(frozen=True)
class Prediction:
    """What a server does that drafts over ``size`` ids.

    Attributes:
        size: ids in the map; the vocabulary's size for drafting without a map.
        coverage: share of the text's tokens within the map; None without text.
        accept: mean accept length.
        cycle_ms: time of a draft and verify cycle.
        measured: whether accept lengths were measured on both sides of ``size``, or at it.
    """

    size: int
    coverage: float | None
    accept: float
    cycle_ms: float
    measured: bool

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second of one request."""
        return 1000 * self.accept / self.cycle_ms


def accept_length(chance: float, steps: int) -> float:
    """Mean accept length of ``steps`` drafts that are each accepted with ``chance``."""
    return float(sum(chance**i for i in range(steps + 1)))


def step_chance(accept: float, steps: int) -> float:
    """The chance of a step that gives the mean accept length ``accept``.

    Raises:
        TokenMapError: no chance from 0 to 1 does.
    """
    if not 1 <= accept <= steps + 1:
        raise TokenMapError(
            f"accept length {accept:g} is not possible with {steps} draft steps: it counts the"
            f" bonus token, so it lies between 1 and {steps + 1}"
        )
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if accept_length(middle, steps) < accept else (low, middle)
    return (low + high) / 2


class AcceptModel:
    """Accept length by map size, through the measured ones.

    Args:
        measured: size -> accept length, at least one.
        steps: draft steps of a cycle.
        coverage: share of the traffic's tokens within the first so many ids; None if unknown, and
            then the chance itself is interpolated over the logarithm of the size.

    Raises:
        TokenMapError: an accept length is impossible, or unknown coverage and fewer than two sizes.
    """

    def __init__(
        self, measured: Mapping[int, float], steps: int, coverage: Coverage | None
    ) -> None:
        if coverage is None and len(measured) < 2:
            raise TokenMapError(
                "one accept length says nothing about other sizes; give held-out text with --text,"
                " or accept lengths at two sizes or more"
            )
        self._measured = dict(sorted(measured.items()))
        self._steps = steps
        self._coverage = coverage
        self._ratios = [
            step_chance(accept, steps) / self._covered(size)
            for size, accept in self._measured.items()
        ]

    def accept(self, size: int) -> float:
        """Mean accept length with a map of ``size`` ids."""
        ratio = np.interp(np.log(size), np.log(list(self._measured)), self._ratios)
        return accept_length(min(1.0, float(ratio) * self._covered(size)), self._steps)

    def within(self, size: int) -> bool:
        """Whether ``size`` lies between measured sizes, or is one."""
        return min(self._measured) <= size <= max(self._measured)

    def left_out_error(self) -> float | None:
        """How far the model is off, at worst, for a measured size when that is left out.

        Returns:
            A relative error over the sizes between the smallest and the largest; None with fewer
            than three.
        """
        inner = list(self._measured)[1:-1]
        errors = []
        for size in inner:
            others = {s: a for s, a in self._measured.items() if s != size}
            predicted = AcceptModel(others, self._steps, self._coverage).accept(size)
            errors.append(abs(predicted / self._measured[size] - 1))
        return max(errors, default=None)

    def _covered(self, size: int) -> float:
        if self._coverage is None:
            return 1.0
        # A map that covers nothing accepts nothing, whatever the ratio.
        return max(self._coverage(size), 1e-9)


def cycle_time(
    cycle_ms: Mapping[int, float], step_ms: Mapping[int, float] | None = None, steps: int = 1
) -> VocabularyLine:
    """The line through measured times, in seconds a cycle.

    Args:
        cycle_ms: size -> time of a whole cycle. Two sizes or more give the line; with ``step_ms``
            one is enough, because it only has to fix what does not depend on the size.
        step_ms: size -> time of a draft step, or of its head alone, at two sizes or more.
        steps: how many of those a cycle has.

    Raises:
        TokenMapError: too few sizes, a time that is not positive, or times that fall as the
            vocabulary grows.
    """
    if not cycle_ms or min((*cycle_ms.values(), *(step_ms or {}).values())) <= 0:
        raise TokenMapError("give the time of a whole cycle, in ms, at one size at least")
    sloped = step_ms or cycle_ms
    if len(sloped) < 2:
        raise TokenMapError(
            f"one time, at {next(iter(sloped))} ids, gives no line; time a second size, far from"
            " the first"
        )
    line = vocabulary_line(list(sloped), [ms / 1000 for ms in sloped.values()])
    slope = line.per_token_s * (steps if step_ms else 1)
    if slope < 0:
        raise TokenMapError(
            f"the times fall as the vocabulary grows ({1e6 * slope:.3f} µs per 1,000 ids): noise is"
            " larger than the effect; time sizes further apart, and longer"
        )
    fixed = [ms / 1000 - slope * size for size, ms in cycle_ms.items()]
    return VocabularyLine(float(np.mean(fixed)), slope, line.r_squared)


def predict(
    sizes: Sequence[int], time: VocabularyLine, accept: AcceptModel, coverage: Coverage | None
) -> list[Prediction]:
    """What each size gives."""
    return [
        Prediction(
            size=size,
            coverage=coverage(size) if coverage else None,
            accept=accept.accept(size),
            cycle_ms=1000 * time.seconds(size),
            measured=accept.within(size),
        )
        for size in sizes
    ]


def fastest(predictions: Sequence[Prediction]) -> Prediction:
    """The prediction with most tokens per second; of equal ones the smaller size."""
    return max(predictions, key=lambda p: (p.tokens_per_s, -p.size))


def nearly_fastest(predictions: Sequence[Prediction]) -> list[Prediction]:
    """Those within :data:`FLAT` of the fastest."""
    least = (1 - FLAT) * fastest(predictions).tokens_per_s
    return [p for p in predictions if p.tokens_per_s >= least]


def size_grid(largest: int) -> list[int]:
    """Sizes to consider: 2,048 · 2^i and 3,072 · 2^i up to ``largest``, and that itself."""
    sizes = {start << i for start in (2048, 3072) for i in range(16)}
    return sorted({size for size in sizes if size < largest} | {largest})
