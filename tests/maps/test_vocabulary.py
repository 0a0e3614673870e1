import base64
import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from sgl_frspec.maps import (
    TokenMapError,
    read_vocabulary,
    required_token_ids,
    tokenizer_fingerprint,
)
from sgl_frspec.maps.byte_alphabet import token_bytes
from sgl_frspec.maps.fingerprint import fingerprint_of_tokens
from sgl_frspec.maps.tiktoken_files import tiktoken_tokenizer
from tests.maps.conftest import TEXT


def edited(model_dir: Path, folder: Path, edit: object, **dump: object) -> Path:
    data = json.loads((model_dir / "tokenizer.json").read_text())
    edit(data)  # pyright: ignore[reportCallIssue]
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(data, **dump))  # pyright: ignore[reportArgumentType]
    return path


def test_fingerprint_ignores_formatting_and_where_added_tokens_stand(
    model_dir: Path, tmp_path: Path
):
    def shuffle(data: dict) -> None:
        vocab = data["model"]["vocab"]
        vocab |= {a["content"]: a["id"] for a in data["added_tokens"]}
        data["model"]["vocab"] = dict(sorted(vocab.items()))
        data["truncation"] = {"max_length": 4}

    path = edited(model_dir, tmp_path, shuffle, indent=3, sort_keys=True)
    assert tokenizer_fingerprint(path) == tokenizer_fingerprint(model_dir)


def test_fingerprint_equals_that_of_the_loaded_tokenizer(model_dir: Path):
    loaded = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    assert fingerprint_of_tokens(loaded.get_vocab()) == tokenizer_fingerprint(model_dir)


def test_fingerprint_sees_two_swapped_ids(model_dir: Path, tmp_path: Path):
    def swap(data: dict) -> None:
        vocab = data["model"]["vocab"]
        vocab["a"], vocab["b"] = vocab["b"], vocab["a"]

    assert tokenizer_fingerprint(edited(model_dir, tmp_path, swap)) != tokenizer_fingerprint(
        model_dir
    )


def test_required_ids_are_end_of_turn_then_special_and_tool_tokens(model_dir: Path):
    vocabulary = read_vocabulary(model_dir)
    required = [vocabulary.by_id[i] for i in required_token_ids(model_dir)]
    assert required == ["<|im_end|>", "<|im_start|>", "<tool_call>"]
    assert {vocabulary.by_id[i] for i in vocabulary.placeholder_ids} == {
        "<|reserved_0|>",
        "<|pad|>",
    }


def test_eos_ids_of_the_generation_configuration_come_first(model_dir: Path, tmp_path: Path):
    edited(model_dir, tmp_path, lambda data: None)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [65, 66]}')
    (tmp_path / "config.json").write_text('{"eos_token_id": 66, "vocab_size": 1024}')
    vocabulary = read_vocabulary(tmp_path)
    assert vocabulary.eos_ids[:2] == (65, 66)
    assert vocabulary.model_vocab_size == 1024


def test_unigram_vocabularies_list_pairs(tmp_path: Path):
    path = tmp_path / "tokenizer.json"
    path.write_text('{"model": {"vocab": [["<unk>", 0.0], ["▁a", -1.5]]}}')
    assert read_vocabulary(path).tokens == {"<unk>": 0, "▁a": 1}


@pytest.mark.parametrize(
    ("content", "message"),
    [("{", "not valid JSON"), ("[1]", "expected a JSON object"), ("{}", "not a Hugging Face")],
)
def test_damaged_tokenizer(tmp_path: Path, content: str, message: str):
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(TokenMapError, match=message):
        read_vocabulary(tmp_path)


def test_missing_tokenizer(tmp_path: Path):
    with pytest.raises(TokenMapError, match="nothing is downloaded"):
        tokenizer_fingerprint(tmp_path)


@pytest.mark.parametrize(
    ("token", "byte_level", "expected"),
    [
        ("Ġthe", True, b" the"),
        ("Ã¼", True, "ü".encode()),
        ("é", True, b"\xe9"),
        ("é", False, "é".encode()),
        ("<0x0A>", True, b"<0x0A>"),
        ("<0x0A>", False, b"\n"),
        ("▁the", False, b" the"),
        ("你", False, "你".encode()),
    ],
)
def test_bytes_of_a_token(token: str, byte_level: bool, expected: bytes):
    assert token_bytes(token, byte_level=byte_level) == expected


@pytest.fixture
def rank_file(tmp_path: Path) -> Path:
    merges = [b"th", b"the", b" the", b"at", b"cat", b" cat", "ü".encode()]
    ranks = [bytes([b]) for b in range(256)] + merges
    path = tmp_path / "small.tiktoken"
    path.write_text("".join(f"{base64.b64encode(t).decode()} {i}\n" for i, t in enumerate(ranks)))
    return path


def test_tiktoken_ranks_are_ids(rank_file: Path):
    vocabulary = read_vocabulary(rank_file)
    assert vocabulary.size == 263
    assert vocabulary.tokens["Ġthe"] == 258
    assert vocabulary.required_ids == ()


def test_tiktoken_merges(rank_file: Path):
    tokenizer = tiktoken_tokenizer(rank_file)
    assert tokenizer.encode("the cat the ü").ids == [257, 261, 258, 32, 262]


def test_tiktoken_damaged_line(rank_file: Path):
    rank_file.write_text(rank_file.read_text() + "???\n")
    with pytest.raises(TokenMapError, match="line 264 is not `base64 rank`"):
        read_vocabulary(rank_file)


def test_small_tokenizer_is_lossless(model_dir: Path):
    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    assert [tokenizer.decode(tokenizer.encode(text).ids) for text in TEXT] == TEXT
