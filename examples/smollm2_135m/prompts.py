"""Prompts: the held-out ones we wrote, and those the target writes itself for training."""

import json
import random
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "prompts"
_OVERLAP_WORDS = 8


@dataclass(frozen=True)
class Prompt:
    """A user's message and its domain."""

    text: str
    domain: str


def eval_prompts() -> list[Prompt]:
    """Return the held-out prompts, never used for training or ranking."""
    lines = (FOLDER / "eval.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    return [Prompt(row["prompt"], row["domain"]) for row in rows]


def chat_ids(tokenizer: Any, prompt: str) -> list[int]:
    """Return the token ids of a conversation with one message, up to the assistant's turn."""
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True
    )
    return tokenizer.encode(text, add_special_tokens=False)


@dataclass(frozen=True)
class OpenTurn:
    """A context that ends inside the user's turn, for the target to go on with."""

    ids: list[int]
    opening: str
    domain: str


def open_turns(tokenizer: Any, count: int, seed: int) -> list[OpenTurn]:
    """Draw contexts from which the target writes user messages.

    Every domain gives its share; a system message and the first words are drawn at random.
    """
    seeds = json.loads((FOLDER / "seeds.json").read_text(encoding="utf-8"))
    draw = random.Random(seed)
    turns: list[OpenTurn] = []
    for domain, parts in seeds.items():
        for _ in range(round(count * parts["share"])):
            system, opening = draw.choice(parts["systems"]), draw.choice(parts["openings"])
            text = f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\n{opening}"
            ids = tokenizer.encode(text, add_special_tokens=False)
            turns.append(OpenTurn(ids, opening, domain))
    draw.shuffle(turns)
    return turns


def _grams(words: list[str], length: int) -> set[tuple[str, ...]]:
    return {tuple(words[i : i + length]) for i in range(len(words) - length + 1)}


def usable_prompts(candidates: list[Prompt], held_out: list[Prompt]) -> list[Prompt]:
    """Drop repeated prompts, those of hardly any words, and those close to a held-out one.

    Close means that they share eight consecutive words, or all words of the shorter prompt.
    """
    held = [re.findall(r"\w+", prompt.text.lower()) for prompt in held_out]
    # By length: what of the held-out prompts a candidate's own run of words must not equal.
    forbidden = {
        length: {gram for words in held for gram in _grams(words, length)}
        for length in range(1, _OVERLAP_WORDS + 1)
    }
    short = {tuple(words) for words in held if len(words) < _OVERLAP_WORDS}
    known: set[str] = set()
    kept: list[Prompt] = []
    for prompt in candidates:
        words = re.findall(r"\w+", prompt.text.lower())
        key, length = " ".join(words), min(_OVERLAP_WORDS, len(words))
        if len(key) < 8 or key in known or _grams(words, length) & forbidden[length]:
            continue
        if any(whole in _grams(words, len(whole)) for whole in short):
            continue
        known.add(key)
        kept.append(prompt)
    return kept
