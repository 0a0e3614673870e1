"""What is sent to a server under measurement, and what must come back."""

import lzma
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from bench.serving.chain import Chain
from bench.serving.client import Answer
from examples.smollm2_135m.serving import FOLDER


@dataclass(frozen=True)
class Workload:
    """``batch`` requests at once, each with ``context`` tokens of prompt."""

    batch: int
    context: int

    @classmethod
    def parse(cls, text: str) -> "Workload":
        """From ``16x300``.

        Raises:
            ValueError: the text is something else.
        """
        parts = text.split("x")
        if len(parts) != 2 or not all(part.isdigit() for part in parts):
            raise ValueError(f"{text!r} is no workload: write batch x context, as 16x300")
        return cls(*map(int, parts))

    def kv_tokens(self, new_tokens: int, nodes: int, top_k: int, steps: int) -> int:
        """Upper bound of the cache's tokens: prompts, answers, and one tree in the making each."""
        tree = nodes + top_k * steps
        return self.batch * (self.context + new_tokens + 2 * tree + 64)


class Prompts(Protocol):
    """A source of prompts."""

    def of(self, workload: Workload) -> list[list[int]]:
        """The prompts of a workload, the same for every variant."""
        ...

    def wrong(self, workload: Workload, answers: Sequence[Answer]) -> int | None:
        """How many answers are not what the target must say; None where that is not known."""
        ...

    def expected_accept(
        self, workload: Workload, new_tokens: int, steps: int, mapped: bool
    ) -> float | None:
        """Accept length of a right server; None where that is not known."""
        ...


@dataclass(frozen=True)
class ChainPrompts:
    """Random tokens and then one of the chain, whose continuation is known."""

    chain: Chain

    def of(self, workload: Workload) -> list[list[int]]:
        """A different prompt for each request."""
        return [
            self.chain.prompt(segment, workload.context, seed=workload.context)
            for segment in range(workload.batch)
        ]

    def wrong(self, workload: Workload, answers: Sequence[Answer]) -> int:
        """Answers that are not the chain."""
        return sum(
            answer.ids != self.chain.continuation(segment, len(answer.ids))
            for segment, answer in enumerate(answers)
        )

    def expected_accept(
        self, workload: Workload, new_tokens: int, steps: int, mapped: bool
    ) -> float | None:
        """By the chain's pattern; the last cycle may go on beyond the answer."""
        cycles = self.chain.cycles(0, new_tokens, steps, mapped)
        return (new_tokens - 1) / cycles


class RealPrompts:
    """The embedded model's held-out texts, one behind the other, cut into prompts.

    A right answer is not known beforehand; ``--verify-text`` compares with the target alone.
    """

    def __init__(self) -> None:
        self._ids = [token for text in held_out_texts() for token in text]

    def of(self, workload: Workload) -> list[list[int]]:
        """Cuts that begin at different places, over the end of the text if need be."""
        stride = max(1, len(self._ids) // workload.batch)
        doubled = self._ids * (2 + workload.context // len(self._ids))
        return [doubled[stride * i : stride * i + workload.context] for i in range(workload.batch)]

    def wrong(self, workload: Workload, answers: Sequence[Answer]) -> int | None:
        """Not known."""
        return None

    def expected_accept(
        self, workload: Workload, new_tokens: int, steps: int, mapped: bool
    ) -> float | None:
        """Not known."""
        return None


def held_out_texts() -> list[list[int]]:
    """Token ids of what the embedded target answered to prompts that no draft or map has seen."""
    texts = []
    for path in sorted((FOLDER / "held_out").glob("*.ids.xz")):
        lines = lzma.decompress(path.read_bytes()).decode().splitlines()
        texts += [[int(token) for token in line.split()] for line in lines]
    return texts
