"""Turn the packaged GGUF file of SmolLM2-135M-Instruct into a Hugging Face folder.

    python -m examples.smollm2_135m.convert --out .cache/smollm2-135m

The folder holds config.json, generation_config.json, tokenizer.json, tokenizer_config.json,
chat_template.jinja and model.safetensors (bf16). It appears under its name only when complete, and
a second call finds it done. The downloaded package (93 MB) stays beside the folder.
"""

import argparse
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from gguf import GGUFReader
from safetensors.torch import save_file

from examples.smollm2_135m.gguf_source import (
    GGUF_SHA256,
    download_wheel,
    extract_gguf,
    verify_gguf,
)
from examples.smollm2_135m.gguf_tensors import metadata, read_weights
from examples.smollm2_135m.gguf_tokenizer import build_tokenizer, tokenizer_config

RECORD = "conversion.json"
# Raised when the written files change, so that an older folder is converted again.
FORMAT_VERSION = 1


def model_config(reader: GGUFReader) -> dict[str, Any]:
    """Return the contents of ``config.json`` for the Llama architecture."""
    hidden = metadata(reader, "llama.embedding_length")
    heads = metadata(reader, "llama.attention.head_count")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": metadata(reader, "llama.feed_forward_length"),
        "num_hidden_layers": metadata(reader, "llama.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": metadata(reader, "llama.attention.head_count_kv"),
        "head_dim": hidden // heads,
        "hidden_act": "silu",
        "max_position_embeddings": metadata(reader, "llama.context_length"),
        "rms_norm_eps": round(metadata(reader, "llama.attention.layer_norm_rms_epsilon"), 12),
        "rope_theta": metadata(reader, "llama.rope.freq_base"),
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "vocab_size": metadata(reader, "llama.vocab_size"),
        "bos_token_id": metadata(reader, "tokenizer.ggml.bos_token_id"),
        "eos_token_id": metadata(reader, "tokenizer.ggml.eos_token_id"),
        "pad_token_id": metadata(reader, "tokenizer.ggml.padding_token_id"),
        "torch_dtype": "bfloat16",
    }


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def write_folder(gguf: Path, folder: Path) -> None:
    """Convert ``gguf`` into the existing, empty ``folder``."""
    reader = GGUFReader(gguf)
    config = model_config(reader)
    _write_json(folder / "config.json", config)
    generation = {k: config[k] for k in ("bos_token_id", "eos_token_id", "pad_token_id")}
    _write_json(folder / "generation_config.json", generation)
    build_tokenizer(reader).save(str(folder / "tokenizer.json"))
    _write_json(folder / "tokenizer_config.json", tokenizer_config(reader))
    template = metadata(reader, "tokenizer.chat_template")
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    save_file(read_weights(reader), folder / "model.safetensors", metadata={"format": "pt"})
    _write_json(folder / RECORD, {"gguf_sha256": GGUF_SHA256, "format_version": FORMAT_VERSION})


def is_converted(folder: Path) -> bool:
    """Tell whether ``folder`` is a complete conversion by this version."""
    record = folder / RECORD
    if not record.is_file():
        return False
    expected = {"gguf_sha256": GGUF_SHA256, "format_version": FORMAT_VERSION}
    return json.loads(record.read_text(encoding="utf-8")) == expected


def convert(out: Path, gguf: Path | None = None, wheel: Path | None = None) -> bool:
    """Make the model folder ``out``; download the package unless a file is given.

    Returns:
        False when the folder was already there.

    Raises:
        ValueError: a wrong source file, or ``out`` is some other folder.
        RuntimeError: the download failed.
    """
    if is_converted(out):
        return False
    if out.exists() and not (out / RECORD).is_file():
        raise ValueError(f"{out} exists and is not a converted model; choose another --out")
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}-") as scratch:
        work = Path(scratch)
        if gguf is None:
            gguf = extract_gguf(wheel or download_wheel(out.parent), work)
        verify_gguf(gguf)
        (work / "model").mkdir()
        write_folder(gguf, work / "model")
        (work / "model" / "model.safetensors").chmod(0o644)  # safetensors makes it private
        shutil.rmtree(out, ignore_errors=True)
        os.replace(work / "model", out)
    return True


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder to make")
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--gguf", type=Path, help="use this GGUF file instead of downloading")
    source.add_argument("--wheel", type=Path, help="use this wheel instead of downloading")
    arguments = parser.parse_args()
    try:
        made = convert(arguments.out, arguments.gguf, arguments.wheel)
    except (ValueError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"{arguments.out}: {'converted' if made else 'already converted'}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
