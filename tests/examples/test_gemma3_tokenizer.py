"""The rule for Gemma's merges against the published tokenizer, which set-up fetches."""

import json
from pathlib import Path

import pytest

from examples.gemma3_270m.gguf_tokenizer import merges_of

PUBLISHED = Path(__file__).parents[2] / ".cache/tokenizers/gemma3/tokenizer.json"


def test_merges_of_the_published_tokenizer() -> None:
    """Scores fall by one a piece from 0, which is also the score of what was added by hand."""
    if not PUBLISHED.is_file():
        pytest.skip(f"no {PUBLISHED}: `make tokenizers` needs npm for it")
    tokenizer = json.loads(PUBLISHED.read_text(encoding="utf-8"))
    vocabulary = tokenizer["model"]["vocab"]
    pieces = sorted(vocabulary, key=vocabulary.__getitem__)
    added = {token["content"] for token in tokenizer["added_tokens"]}
    first = vocabulary["▁t"]
    scores = [0.0 if piece in added else float(first - i) for i, piece in enumerate(pieces)]
    expected = [tuple(pair) for pair in tokenizer["model"]["merges"]]
    assert len(expected) > 500_000
    assert merges_of(pieces, scores) == expected
