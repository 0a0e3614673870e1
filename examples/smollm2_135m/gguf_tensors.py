"""GGUF tensors of a Llama-type model as Hugging Face weights.

llama.cpp stores each head's query and key rows interleaved (rotary pairs beside each other);
Hugging Face stores the two halves one after the other. Everything else keeps its layout.
"""

from typing import Any

import numpy as np
import torch
from gguf import GGUFReader, dequantize
from tqdm import tqdm

_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}


def metadata(reader: GGUFReader, key: str) -> Any:
    """Return one metadata value.

    Raises:
        ValueError: the file has no such key.
    """
    field = reader.get_field(key)
    if field is None:
        raise ValueError(f"the GGUF file has no metadata key {key!r}; is it a Llama-type model?")
    return field.contents()


def hugging_face_name(name: str) -> str:
    """Translate ``blk.3.attn_q.weight`` to ``model.layers.3.self_attn.q_proj.weight``.

    Raises:
        ValueError: a tensor this converter does not know.
    """
    stem, _, suffix = name.rpartition(".")
    if stem.startswith("blk."):
        _, index, kind = stem.split(".", 2)
        if kind in _LAYER_NAMES:
            return f"model.layers.{index}.{_LAYER_NAMES[kind]}.{suffix}"
    elif stem in _TOP_NAMES:
        return f"{_TOP_NAMES[stem]}.{suffix}"
    raise ValueError(f"unknown tensor {name!r} in the GGUF file")


def unpermute(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Undo llama.cpp's row order in a query or key matrix ``[num_heads * head_dim, hidden]``."""
    rows, columns = weight.shape
    pairs = weight.reshape(num_heads, rows // num_heads // 2, 2, columns)
    return pairs.swapaxes(1, 2).reshape(rows, columns)


def read_weights(
    reader: GGUFReader, dtype: torch.dtype = torch.bfloat16
) -> dict[str, torch.Tensor]:
    """Dequantise every tensor of the file.

    Returns:
        Hugging Face parameter name to a contiguous tensor of ``dtype``.

    Raises:
        ValueError: an unknown tensor, or missing metadata.
    """
    heads = {
        "attn_q": metadata(reader, "llama.attention.head_count"),
        "attn_k": metadata(reader, "llama.attention.head_count_kv"),
    }
    weights: dict[str, torch.Tensor] = {}
    for tensor in tqdm(reader.tensors, desc="dequantise", unit="tensor"):
        name = hugging_face_name(tensor.name)
        values = dequantize(tensor.data, tensor.tensor_type)
        kind = tensor.name.split(".")[-2]
        if kind in heads:
            values = unpermute(values, heads[kind])
        weights[name] = torch.from_numpy(np.array(values, order="C")).to(dtype)
    return weights
