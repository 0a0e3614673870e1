"""Several servers answer the same prompts: accept lengths by domain, then times, in turns.

All servers answer all prompts once, at the same time, which says how many tokens a round yields.
Then they take turns with a few prompts, alone on the machine, which says how long a round takes. A
turn sends each group of prompts for a short and for a long answer, streamed in two parts: the token
that the prefill gives, and the rest. The time between the two holds no prefill and no request's way
to the server; what the short and the long one have in common (the last part's way back, the first
rounds) drops out of the difference.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from bench.serving import client
from bench.serving.client import Answer
from bench.serving.measure import Lengths, in_turns, most_rounds
from bench.serving.servers import Server

Domains = Mapping[str, Sequence[list[int]]]
Say = Callable[[str], None]


@dataclass(frozen=True)
class Prompt:
    """A tokenised prompt and its domain."""

    domain: str
    ids: list[int]


def mixed(domains: Domains) -> list[Prompt]:
    """Prompts of all domains in turns, so that the first few are of each."""
    longest = max(len(prompts) for prompts in domains.values())
    return [
        Prompt(domain, prompts[i])
        for i in range(longest)
        for domain, prompts in domains.items()
        if i < len(prompts)
    ]


@dataclass(frozen=True)
class Asking:
    """How requests are sent.

    Attributes:
        lengths: of the short and the long answers, in tokens.
        ignore_eos: whether answers go on behind a token that ends them.
    """

    lengths: Lengths
    ignore_eos: bool

    def answers(self, server: Server, texts: Sequence[list[int]], tokens: int) -> list[Answer]:
        """Greedy answers to one batch."""
        sampling: dict[str, Any] = {"temperature": 0, "max_new_tokens": tokens}
        sampling["ignore_eos"] = self.ignore_eos
        return client.generate(server.url, texts, tokens, sampling_params=sampling)

    def all_answers(
        self, servers: Sequence[Server], prompts: Sequence[Prompt], batch: int, say: Say
    ) -> dict[str, list[Answer]]:
        """Long answers to all prompts by variant, all servers at once; none of one that fails."""
        texts = [prompt.ids for prompt in prompts]
        batches = [texts[i : i + batch] for i in range(0, len(texts), batch)]

        def of(server: Server) -> list[Answer]:
            return [a for part in batches for a in self.answers(server, part, self.lengths.long)]

        found: dict[str, list[Answer]] = {}
        with ThreadPoolExecutor(max(1, len(servers))) as pool:
            futures = {server.variant.name: pool.submit(of, server) for server in servers}
            for name, future in futures.items():
                try:
                    found[name] = future.result()
                except client.RequestFailedError as error:
                    say(f"{name} FAILED: {error}")
        return found

    def turn(self, server: Server, groups: Sequence[Sequence[list[int]]]) -> "Turn":
        """Every group once, behind an answer that wakes the server up."""
        self._timed(server, groups[0], self.lengths.short)
        ms, rounds, tokens = 0.0, 0, 0
        for group in groups:
            short_ms, short = self._timed(server, group, self.lengths.short)
            long_ms, long = self._timed(server, group, self.lengths.long)
            more = most_rounds(long) - most_rounds(short)
            if more > 0:  # else all ended before the short answers did
                ms, rounds = ms + long_ms - short_ms, rounds + more
                tokens += sum(len(a.ids) for a in long) - sum(len(a.ids) for a in short)
        return Turn(ms, rounds, tokens)

    def _timed(
        self, server: Server, texts: Sequence[list[int]], tokens: int
    ) -> tuple[float, list[Answer]]:
        """Milliseconds from the first part to the last, and the answers."""
        parts = client.stream(
            server.url,
            texts,
            max_new_tokens=tokens,
            ignore_eos=self.ignore_eos,
            stream_interval=tokens + 1,
        )
        last = {part.get("index", 0): part for _, part in parts}
        if len(last) != len(texts):
            raise client.RequestFailedError(f"{server.url}: {len(last)} of {len(texts)} answers")
        answers = [Answer.of(last[place]) for place in sorted(last)]
        return 1e3 * (parts[-1][0] - parts[0][0]), answers


@dataclass(frozen=True)
class Turn:
    """By how much the long answers of one server's turn exceed the short ones."""

    ms: float
    rounds: int
    tokens: int

    @property
    def ms_round(self) -> float:
        """Milliseconds of a round; NaN where no answer was long enough."""
        return self.ms / self.rounds if self.rounds else float("nan")


def take_turns(
    servers: Sequence[Server],
    asking: Asking,
    groups: Sequence[Sequence[list[int]]],
    alternations: int,
    deadline: float,
    say: Say,
    on_turn: Callable[[dict[str, list[Turn]]], None] = lambda taken: None,
) -> dict[str, list[Turn]]:
    """Turns by variant: A B C, C B A, A B C …; the first, which fills caches, is not counted.

    A server that fails is left out from then on. None begins after ``deadline``, by
    ``time.monotonic()``, once all have one turn. ``on_turn`` gets what there is after each.
    """
    taken: dict[str, list[Turn]] = {server.variant.name: [] for server in servers}

    def turn_of(server: Server) -> Turn:
        return asking.turn(server, groups)

    for i, name, turn in in_turns(servers, alternations, turn_of, say, deadline):
        if i:
            taken[name].append(turn)
            on_turn(_begun(taken))
    return _begun(taken)


def _begun(taken: Mapping[str, list[Turn]]) -> dict[str, list[Turn]]:
    return {name: turns for name, turns in taken.items() if turns}
