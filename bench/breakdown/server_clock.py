"""Time the rounds of running servers, which take turns, inside streamed answers.

A request's whole time holds its prefill and its way through the server's processes, tens of
milliseconds that differ from one request to the next: over the 40 rounds of an answer they hide
what a vocabulary costs. Between the first part behind the prefill's and the last one of a streamed
answer there are decode rounds and nothing else. Only the last part says how many there were, but
the chain tells how many rounds a number of tokens takes. Parts are sent every ``STREAM_INTERVAL``
tokens, not every round: sending costs the server's host time.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from bench.serving import client
from bench.serving.client import Answer
from bench.serving.measure import in_turns
from bench.serving.prompts import ChainPrompts, Workload
from bench.serving.servers import Say, Server

STREAM_INTERVAL = 8  # tokens
NEW_TOKENS = 256
TURNS = 8


@dataclass(frozen=True)
class Stretch:
    """Rounds of one streamed batch.

    Attributes:
        us: between its first part with tokens of a round and its end.
        rounds: in that time.
        accept_length: tokens a round of the whole answer, the target's own one included.
        wrong: wrong answers.
    """

    us: float
    rounds: int
    accept_length: float
    wrong: int

    @property
    def us_per_round(self) -> float:
        """Microseconds of one round."""
        return self.us / self.rounds


def time_in_turns(
    servers: Sequence[Server], workload: Workload, prompts: ChainPrompts, steps: int, say: Say
) -> dict[str, list[Stretch]]:
    """``TURNS`` stretches by variant name: A B C, C B A, …, so that drift falls on all alike.

    A turn before them, which fills the prefix cache, does not count. A server that fails, or runs
    other rounds than the chain implies, is left out from then on; wrong answers are said.

    Args:
        servers: running.
        workload, prompts: what they are asked.
        steps: that their drafts have.
        say: reports failures.
    """
    texts = prompts.of(workload)
    found: dict[str, list[Stretch]] = {server.variant.name: [] for server in servers}

    def stretch_of(server: Server) -> Stretch:
        def rounds(tokens: int) -> int:
            return prompts.chain.cycles(0, tokens, steps, server.variant.mapped)

        parts = client.stream(
            server.url, texts, max_new_tokens=NEW_TOKENS, stream_interval=STREAM_INTERVAL
        )
        return _stretch(server.url, parts, workload, prompts, rounds)

    for turn, name, stretch in in_turns(servers, TURNS, stretch_of, say):
        if stretch.wrong:
            say(f"{name}: {stretch.wrong} of {workload.batch} answers WRONG")
        if turn:
            found[name].append(stretch)
    return found


def _stretch(
    url: str,
    parts: Sequence[tuple[float, dict[str, Any]]],
    workload: Workload,
    prompts: ChainPrompts,
    rounds: Callable[[int], int],
) -> Stretch:
    answers = {part.get("index", 0): Answer.of(part) for _, part in parts}
    # All requests of a batch are in the same rounds: the first one's parts tell when these were.
    first = [(seconds, part) for seconds, part in parts if part.get("index", 0) == 0]
    behind = [(t, n) for t, part in first if (n := part["meta_info"]["completion_tokens"]) > 1]
    if len(behind) < 2:
        raise client.RequestFailedError(f"{url}: a stream of {len(behind)} parts with rounds")
    (begin, early), (end, tokens) = behind[0], behind[-1]
    counted, implied = answers[0].cycles, rounds(tokens)
    if counted != implied:
        raise client.RequestFailedError(
            f"{url}: {tokens} tokens in {counted} rounds, {implied} by the chain"
        )
    return Stretch(
        us=1e6 * (end - begin),
        rounds=implied - rounds(early),
        accept_length=(tokens - 1) / implied,
        wrong=prompts.wrong(workload, [answers[place] for place in sorted(answers)]),
    )
