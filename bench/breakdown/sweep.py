"""Cycles of one implementation against the draft's vocabulary, and the lines through them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench.breakdown.fit import Fit, fit
from bench.breakdown.parts import Split


@dataclass(frozen=True)
class Sweep:
    """What was measured at three vocabularies or more, what was measured again included.

    Attributes:
        vocabs: ascending.
        cycle_us: elapsed time at each; waiting for the host is in it, and its jitter.
        work_us: the GPU's work at each: the cycle without idle time.
        cycle, work: the lines through them.
    """

    vocabs: list[int]
    cycle_us: list[float]
    work_us: list[float]
    cycle: Fit
    work: Fit

    def as_json(self, vocab: int) -> dict[str, Any]:
        """Both lines, and the most that any map can gain over ``vocab`` ids."""
        return {"cycle": self.cycle.as_json(vocab), "gpu_work": self.work.as_json(vocab)}

    def lines(self, name: str, vocab: int) -> list[str]:
        """Both lines in words; ``name`` is the implementation's."""
        return [
            fit_line(f"{name}: cycle", self.cycle, vocab),
            fit_line(f"{name}: GPU work", self.work, vocab),
        ]


def sweeps(splits: Sequence[Split]) -> Mapping[str, Sweep]:
    """Sweeps by implementation; one with fewer than three vocabularies has none."""
    found = {}
    for name in dict.fromkeys(split.implementation for split in splits):
        own = sorted((s for s in splits if s.implementation == name), key=lambda s: s.vocab)
        vocabs = [split.vocab for split in own]
        if len(set(vocabs)) >= 3:
            cycles, work = [s.cycle_us for s in own], [s.busy_us for s in own]
            found[name] = Sweep(vocabs, cycles, work, _line(vocabs, cycles), _line(vocabs, work))
    return found


def _line(vocabs: Sequence[int], us: Sequence[float]) -> Fit:
    return fit(vocabs, [t * 1e-6 for t in us])


def fit_line(what: str, found: Fit, vocab: int) -> str:
    """The fitted line, whether it has a slope, and what it promises a map."""
    line = found.line
    text = (
        f"{what} = {1e3 * line.fixed_s:.3f} ms + {1e6 * line.per_token_s:.5f} ms x V/1000, "
        f"R^2 {line.r_squared:.4f}; "
    )
    if not found.significant:
        return text + f"no significant slope (p {found.p_value:.2g})"
    return text + (
        f"slope +- {1e6 * found.slope_error_s:.5f}, p {found.p_value:.2g}; no map can gain more "
        f"than {line.ceiling(vocab):.2f}x over {vocab:,} ids at an unchanged accept length"
    )
