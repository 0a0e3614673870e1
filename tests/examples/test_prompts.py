"""Prompts: what is held out, and that nothing close to it is trained on."""

import json
import lzma
import re
from collections import Counter
from pathlib import Path

from transformers import AutoTokenizer

from examples.smollm2_135m import prompts as module
from examples.smollm2_135m.prompts import (
    Prompt,
    chat_ids,
    eval_prompts,
    open_turns,
    usable_prompts,
)


def test_held_out_prompts_cover_the_domains() -> None:
    prompts = eval_prompts()
    counts = Counter(p.domain for p in prompts)
    assert set(counts) == {"chat", "code", "math", "translation"}
    assert min(counts.values()) >= 10
    assert len({p.text for p in prompts}) == len(prompts) >= 40


def test_the_draft_was_not_trained_on_held_out_prompts() -> None:
    """The prompts of the committed draft's training, compared in words of any case."""

    def runs(text: str) -> set[tuple[str, ...]]:
        words = re.findall(r"\w+", text.lower())
        return {tuple(words[i : i + 8]) for i in range(max(1, len(words) - 7))}

    path = module.FOLDER.parent / "draft" / "training_prompts.jsonl.xz"
    rows = [json.loads(line) for line in lzma.decompress(path.read_bytes()).splitlines()]
    assert len(rows) == 22283
    trained: set[tuple[str, ...]] = set()
    for row in rows:
        trained |= runs(row["prompt"])
    for prompt in eval_prompts():
        assert not runs(prompt.text) & trained, prompt.text


def test_prompts_close_to_held_out_ones_are_dropped() -> None:
    held = [Prompt("Write a C function that reverses a string in place.", "code")]
    same = "please write a C function that reverses a string, quickly"
    other = "Write a C function that sorts an array of numbers."
    candidates = [
        Prompt(held[0].text, "code"),
        Prompt(held[0].text.upper(), "chat"),
        Prompt(same, "code"),
        Prompt(other, "code"),
        Prompt("  " + other + "!", "code"),
        Prompt("Why?", "chat"),
    ]
    assert usable_prompts(candidates, held) == [candidates[3]]


def test_a_short_held_out_prompt_is_dropped_inside_a_longer_one() -> None:
    held = [Prompt("Add two numbers", "math")]
    candidates = [
        Prompt("Now add two numbers together for me", "math"),
        Prompt("Two numbers", "math"),
        Prompt("Add three cats", "math"),
    ]
    assert usable_prompts(candidates, held) == [candidates[2]]


def test_openings_are_not_held_out_prompts(smollm2: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    turns = open_turns(tokenizer, 400, seed=3)
    assert turns == open_turns(tokenizer, 400, seed=3)
    assert turns != open_turns(tokenizer, 400, seed=4)
    assert {t.domain for t in turns} == {"chat", "code", "math", "translation"}
    held = {p.text for p in eval_prompts()}
    for turn in turns:
        assert turn.opening not in held
        text = tokenizer.decode(turn.ids)
        assert text.endswith("<|im_start|>user\n" + turn.opening)


def test_chat_ids_end_with_the_assistants_turn(smollm2: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    text = tokenizer.decode(chat_ids(tokenizer, "Hi there"))
    assert text.endswith("<|im_start|>user\nHi there<|im_end|>\n<|im_start|>assistant\n")
