"""Held-out beginnings and those that the target writes stay apart."""

import json
from collections import Counter

from examples.eagle_training.context import Context
from examples.gemma3_270m.prompts import DOMAINS, FOLDER, held_out, starts, usable


class Characters:
    """A tokenizer of characters behind a beginning-of-sequence id."""

    def encode(self, text: str) -> list[int]:
        return [0, *map(ord, text)]


def test_held_out_beginnings_cover_the_domains() -> None:
    contexts = held_out(Characters())
    assert Counter(context.domain for context in contexts) == dict.fromkeys(DOMAINS, 20)
    assert len({tuple(context.ids) for context in contexts}) == 120


def test_every_domain_gives_its_share() -> None:
    found = Counter(context.domain for context in starts(Characters(), 800, seed=3))
    assert found == {
        "english": 200,
        "code": 200,
        "german": 100,
        "french": 100,
        "spanish": 100,
        "chinese": 100,
    }
    assert starts(Characters(), 50, seed=3) == starts(Characters(), 50, seed=3)


def test_no_start_is_a_held_out_beginning() -> None:
    contexts = [
        Context(Characters().encode(start), domain)
        for domain, parts in json.loads((FOLDER / "starts.json").read_text()).items()
        for start in parts["starts"]
    ]
    finals = {tuple(context.ids) for context in held_out(Characters())}
    assert not finals & {tuple(context.ids) for context in contexts}


def test_beginnings_close_to_held_out_ones_are_dropped() -> None:
    held = [Context([0, 1, 2, 3, 4, 5, 6, 7, 8], "english"), Context([0, 50, 51, 52], "code")]
    shares_six = Context([0, 9, 3, 4, 5, 6, 7, 8], "english")
    shares_five = Context([0, 9, 4, 5, 6, 7, 8, 9], "english")
    holds_the_short_one = Context([0, 9, 9, 9, 9, 9, 9, 50, 51, 52], "code")
    holds_a_part_of_it = Context([0, 9, 9, 9, 9, 9, 9, 50, 51], "code")
    only_bos_in_common = Context([0, 60, 61, 62, 63, 64, 65], "german")
    found = usable(
        [
            shares_six,
            shares_five,
            holds_the_short_one,
            holds_a_part_of_it,
            shares_five,
            only_bos_in_common,
        ],
        held,
    )
    assert found == [shares_five, holds_a_part_of_it, only_bos_in_common]
