"""Tokenizers of 128k to 262k tokens: special tokens, counts, order, tiktoken against its twin."""

import collections
import json

import pytest
from tokenizers import Tokenizer

from sgl_frspec import cli
from sgl_frspec.maps import load_token_map, read_vocabulary
from sgl_frspec.maps.byte_alphabet import token_bytes
from sgl_frspec.maps.corpus.counter import load_tokenizer
from tests.maps.real_tokenizers import CACHE, PACKAGES

SAMPLES = [
    "The committee's report, published in 1987, wasn't read by anyone who'd asked for it.\n",
    "def fibonacci(n: int) -> list[int]:\n    a, b = 0, 1\n    while a < n:\n\t\tyield a\n",
    "Die Straßenbahn fährt heute später; über 12.500 Fahrgäste müssen warten.\n\n",
    "今天的天气很好,我们去公园散步吧。価格は1,200円です。",
    "Мы поехали на дачу. الطقس جميل اليوم. आज मौसम अच्छा है। 오늘 날씨가 좋네요.",
    "naïve café 🙂👩‍👩‍👧 ½ ≤ ∑ \u200b x²  \r\n   trailing   spaces   ",
]
# Size of the tokenizer, ends of turn, and one special token that must be proposable.
EXPECTED = {
    "llama3": (128_256, {"<|eot_id|>", "<|end_of_text|>"}, "<|start_header_id|>"),
    "qwen3": (151_669, {"<|im_end|>", "<|endoftext|>"}, "<tool_call>"),
    "gemma3": (262_145, {"<end_of_turn>", "<eos>"}, "<start_of_turn>"),
    "deepseek": (129_280, {"<｜end▁of▁sentence｜>"}, "<think>"),
}
# Slots and media marks, which no language model writes.
NEVER_FIRST = {
    "llama3": "<|reserved_special_token_5|>",
    "qwen3": "<|image_pad|>",
    "gemma3": "<unused7>",
    "deepseek": "<｜▁pad▁｜>",
}


def cached(name):
    if not (CACHE / name).is_dir():
        pytest.skip(f"no {name} in {CACHE}: `make tokenizers` needs npm for it")
    return CACHE / name


@pytest.fixture(scope="module", params=PACKAGES)
def folder(request):
    return cached(request.param)


@pytest.fixture(scope="module")
def vocabulary(folder):
    return read_vocabulary(folder)


@pytest.fixture(scope="module")
def tokenizer(vocabulary):
    return load_tokenizer(vocabulary)


def test_special_tokens(folder, vocabulary):
    if folder.name not in EXPECTED:
        assert vocabulary.eos_ids == (), "a rank file names no special tokens"
        return
    size, ends, special = EXPECTED[folder.name]
    assert vocabulary.size == size
    assert {vocabulary.by_id[i] for i in vocabulary.eos_ids} == ends
    required = [vocabulary.by_id[i] for i in vocabulary.required_ids]
    assert set(required[: len(ends)]) == ends
    assert special in required
    assert vocabulary.tokens[NEVER_FIRST[folder.name]] in vocabulary.placeholder_ids
    assert len(required) < 100


def test_tokens_spell_the_text(vocabulary, tokenizer):
    for text in SAMPLES:
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        tokens = (vocabulary.by_id[i] for i in ids)
        spelled = b"".join(token_bytes(t, byte_level=vocabulary.byte_level) for t in tokens)
        assert spelled.decode().removeprefix(" ") == text.removeprefix(" ")


def test_rank(folder, vocabulary, tokenizer, tmp_path, capsys):
    text, output = tmp_path / "text.jsonl", tmp_path / "m.safetensors"
    text.write_text("".join(json.dumps({"text": sample}) + "\n" for sample in SAMPLES * 3))
    argv = ["rank", "--tokenizer", str(folder), "-o", str(output), "--workers", "2", str(text)]
    if not vocabulary.eos_ids:
        assert cli.main(argv) == 1
        assert "--require" in capsys.readouterr().err
        argv += ["--require", str(vocabulary.size + 2), "--vocab-size", str(vocabulary.size + 100)]
    assert cli.main(argv) == 0
    token_map = load_token_map(output)
    counts = collections.Counter()
    for sample in SAMPLES * 3:
        counts.update(tokenizer.encode(sample, add_special_tokens=False).ids)
    assert token_map.counts is not None
    pairs = zip(token_map.ids.tolist(), token_map.counts.tolist(), strict=True)
    assert {i: c for i, c in pairs if c} == dict(counts)
    first = len(token_map.metadata.required_ids)
    seen = [i for i in counts if i not in token_map.metadata.required_ids]
    in_order = sorted(seen, key=lambda i: (-counts[i], i))
    assert token_map.ids[first : first + len(seen)].tolist() == in_order
    assert len(token_map) == len(set(vocabulary.tokens.values()) | {*token_map.ids[:first]})


def test_tiktoken_ranks_make_the_same_tokens_as_the_json():
    ours = load_tokenizer(read_vocabulary(cached("qwen-tiktoken")))
    theirs = Tokenizer.from_file(str(cached("qwen3") / "tokenizer.json"))
    for text in [*SAMPLES, "".join(SAMPLES)]:
        assert ours.encode(text).ids == theirs.encode(text, add_special_tokens=False).ids
