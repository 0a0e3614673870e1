"""What the base model continues: beginnings of texts in five languages, and of programs."""

import json
import random
from pathlib import Path
from typing import Any

from examples.eagle_training.context import Context

FOLDER = Path(__file__).parent / "prompts"
DOMAINS = ("english", "code", "german", "french", "spanish", "chinese")
_OVERLAP_TOKENS = 6


def held_out(tokenizer: Any) -> list[Context]:
    """Return the held-out beginnings, never trained on or ranked by, with the token ``<bos>``."""
    lines = (FOLDER / "eval.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    return [Context(tokenizer.encode(row["prompt"]), row["domain"]) for row in rows]


def starts(tokenizer: Any, count: int, seed: int) -> list[Context]:
    """Draw first words from which the target writes beginnings; every domain gives its share."""
    domains = json.loads((FOLDER / "starts.json").read_text(encoding="utf-8"))
    draw = random.Random(seed)
    contexts = [
        Context(tokenizer.encode(draw.choice(parts["starts"])), domain)
        for domain, parts in domains.items()
        for _ in range(round(count * parts["share"]))
    ]
    draw.shuffle(contexts)
    return contexts


def usable(beginnings: list[Context], held: list[Context]) -> list[Context]:
    """Drop repeated beginnings, and those that hold six tokens in a row of a held-out one.

    A held-out one of fewer tokens must not occur as a whole. ``<bos>``, with which both kinds
    start, does not count.
    """
    forbidden: dict[int, set[tuple[int, ...]]] = {}
    for context in held:
        length = min(_OVERLAP_TOKENS, len(context.ids) - 1)
        forbidden.setdefault(length, set()).update(_grams(context.ids[1:], length))
    known: set[tuple[int, ...]] = set()
    kept: list[Context] = []
    for context in beginnings:
        key = tuple(context.ids)
        close = any(_grams(context.ids[1:], n) & grams for n, grams in forbidden.items())
        if key not in known and not close:
            known.add(key)
            kept.append(context)
    return kept


def _grams(ids: list[int], length: int) -> set[tuple[int, ...]]:
    return {tuple(ids[i : i + length]) for i in range(len(ids) - length + 1)}
