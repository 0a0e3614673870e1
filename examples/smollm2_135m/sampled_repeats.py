"""What a server answers again: seeded replies token by token, log probabilities bit by bit.

The same requests are asked in batches of 16 and then again in other ways: the same batches, in the
reverse order, each with a greedy neighbour, and alone. A seeded reply follows from its seed as long
as the model's logits do, and these can differ in their last bits with the batch. So the greedy
replies' log probabilities are compared too: where they differ, no sampler can repeat every reply.
"""

from collections.abc import Callable, Sequence
from typing import Any

from examples.smollm2_135m.serving import first_difference, log_probabilities, sample

COMPANY = 16
SEEDED_TOKENS, GREEDY_TOKENS = 24, 24
FIRST_SEED = 1000
# Asks for some requests, by their number, in one batch; None is a greedy neighbour.
Ask = Callable[[list[int | None]], list[Any]]
FIRST, AGAIN, REVERSED, NEIGHBOURS, ALONE = (
    "first", "again", "reversed", "among greedy ones", "alone",
)  # fmt: skip


def ask_in_all_ways(count: int, ask: Ask) -> dict[str, list[Any]]:
    """Answers to requests 0 … ``count`` - 1, by the way of asking."""
    batches: list[list[int | None]] = [
        list(range(start, min(start + COMPANY, count))) for start in range(0, count, COMPANY)
    ]
    ways = {
        FIRST: batches,
        AGAIN: batches,
        REVERSED: [batch[::-1] for batch in batches],
        NEIGHBOURS: [[x for i in batch for x in (None, i)] for batch in batches],
        ALONE: [[i] for i in range(count)],
    }
    found: dict[str, list[Any]] = {}
    for way, asked in ways.items():
        by_number = {
            i: answer
            for batch in asked
            for i, answer in zip(batch, ask(batch), strict=True)
            if i is not None
        }
        found[way] = [by_number[i] for i in range(count)]
    return found


def repeated_seeds(url: str, prompts: Sequence[list[int]], count: int) -> dict[str, Any]:
    """How many of ``count`` seeded replies come again, and where the others part."""
    common = {"max_new_tokens": SEEDED_TOKENS, "ignore_eos": True}

    def ask(batch: list[int | None]) -> list[list[int]]:
        asked = [prompts[(i or 0) % len(prompts)] for i in batch]
        how = [
            common | ({"temperature": 0} if i is None else _seeded(i)) for i in batch
        ]  # fmt: skip
        return [reply.ids for reply in sample(url, asked, how)]

    found = ask_in_all_ways(count, ask)
    return compared_ids(found) | {"distinct": len({tuple(ids) for ids in found[FIRST]})}


def compared_ids(found: dict[str, list[list[int]]]) -> dict[str, Any]:
    """Equal replies of each way, and ``(way, number, first token that differs)`` of the others."""
    first = found[FIRST]
    differences = [
        (way, i, place)
        for way, replies in found.items()
        for i, ids in enumerate(replies)
        if (place := first_difference(first[i], ids)) is not None
    ]
    equal = {
        way: len(first) - sum(where == way for where, _, _ in differences)
        for way in found
        if way != FIRST
    }
    return {"count": len(first), "equal": equal, "differences": differences}


def repeated_log_probabilities(url: str, prompts: Sequence[list[int]], count: int) -> Any:
    """How many of ``count`` greedy replies have the same log probabilities again, bit by bit."""

    def ask(batch: list[int | None]) -> list[list[tuple[int, float]]]:
        asked = [prompts[(i or 0) % len(prompts)] for i in batch]
        return log_probabilities(url, asked, GREEDY_TOKENS)

    return compared_log_probabilities(ask_in_all_ways(count, ask))


def compared_log_probabilities(found: dict[str, list[list[tuple[int, float]]]]) -> dict[str, Any]:
    """Replies of each way that are equal in every bit, and the largest difference.

    Log probabilities are compared up to the first token that differs.
    """
    first = found[FIRST]
    equal, largest = {}, {}
    for way, replies in found.items():
        if way == FIRST:
            continue
        equal[way] = sum(a == b for a, b in zip(first, replies, strict=True))
        largest[way] = max(
            (
                abs(x - y)
                for a, b in zip(first, replies, strict=True)
                for (_, x), (_, y) in _while_tokens_agree(a, b)
            ),
            default=0.0,
        )
    return {"count": len(first), "equal": equal, "largest": largest}


def _while_tokens_agree(a: list[tuple[int, float]], b: list[tuple[int, float]]) -> Any:
    """Pairs of (token, log probability), those of the first other token not included."""
    end = first_difference([token for token, _ in a], [token for token, _ in b])
    return zip(a[:end], b[:end], strict=False)


def _seeded(number: int) -> dict[str, Any]:
    return {"temperature": 1.0, "sampling_seed": FIRST_SEED + number}
