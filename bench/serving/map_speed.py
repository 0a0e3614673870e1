"""What a server yields: accept lengths by domain, milliseconds a round, tokens a second."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from bench.columns import aligned
from bench.serving.client import Answer
from bench.serving.measure import accept_length
from bench.serving.traffic import Prompt, Turn

ALL = "all"


@dataclass(frozen=True)
class Speed:
    """One server at one batch size.

    Attributes:
        turns: how many were timed.
        ms_round, ms_min, ms_max: milliseconds of a round: median and extremes over the turns.
        batch_tokens_per_second: of all requests of a batch together, in the timed turns; median.
        accept: tokens a round, the target's own one included, by domain and over ``all``.
    """

    turns: int
    ms_round: float
    ms_min: float
    ms_max: float
    batch_tokens_per_second: float
    accept: dict[str, float]

    @classmethod
    def of(cls, turns: Sequence[Turn], accept: Mapping[str, float]) -> "Speed":
        """The figures of one server's turns."""
        each = [turn.ms_round for turn in turns]
        rates = [1e3 * turn.tokens / turn.ms if turn.ms else float("nan") for turn in turns]
        return cls(len(turns), median(each), min(each), max(each), median(rates), dict(accept))

    @property
    def accept_length(self) -> float:
        """Over all domains."""
        return self.accept[ALL]

    @property
    def tokens_per_second(self) -> float:
        """Of one request: accept length over all prompts, by the time of a round."""
        return self.of_domain(ALL)

    def of_domain(self, domain: str) -> float:
        """Tokens per second of one request of a domain."""
        return 1e3 * self.accept[domain] / self.ms_round


def accept_by_domain(prompts: Sequence[Prompt], answers: Sequence[Answer]) -> dict[str, float]:
    """Accept lengths by domain, in the order of the prompts, and over ``all``."""
    groups: dict[str, list[Answer]] = {}
    for prompt, answer in zip(prompts, answers, strict=True):
        groups.setdefault(prompt.domain, []).append(answer)
    return {name: accept_length(group) for name, group in (groups | {ALL: list(answers)}).items()}


def table(speeds: Mapping[str, Speed]) -> str:
    """A line for each server; by domain the accept length and one request's tokens/s."""
    domains = [d for d in next(iter(speeds.values())).accept if d != ALL] if speeds else []
    lines = [["", "ms/round", "min–max", "batch tok/s", "tok/s", "accept", *domains]]
    for name, speed in speeds.items():
        by_domain = (f"{speed.accept[d]:.2f} {speed.of_domain(d):.0f}" for d in domains)
        lines.append(
            [
                name,
                f"{speed.ms_round:.3f}",
                f"{speed.ms_min:.3f}–{speed.ms_max:.3f}",
                f"{speed.batch_tokens_per_second:.0f}",
                f"{speed.tokens_per_second:.1f}",
                f"{speed.accept_length:.3f}",
                *by_domain,
            ]
        )
    return "\n".join(aligned(lines))
