"""A tiny random Gemma 3 of our own, as Hugging Face's model and as llama.cpp would pack it."""

from pathlib import Path

import numpy as np
import torch
from gguf import GGUFWriter
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

LAYERS, HIDDEN, HEAD_DIM, WINDOW = 7, 32, 16, 6
_CONTROL, _USER_DEFINED, _BYTE, _NORMAL = 3, 4, 6, 1

SPECIAL = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "<unused0>", "<end_of_turn>"]
USER_DEFINED = ["\n", "\n\n", "  ", "   "]
# A piece a line of SentencePiece's vocabulary, the first merged first.
LEARNT = ["th", "the", "▁the", "he", "▁t", "at", "▁c", "▁cat", "cat", "▁th"]
CHARACTERS = ["▁", *"abcdefghijklmnopqrstuvwxyz", "é"]


def vocabulary() -> tuple[list[str], list[float], list[int]]:
    """Tokens, scores and types in the order of their ids, as GGUF holds them."""
    rows = [(t, -1000.0, _CONTROL) for t in SPECIAL]
    rows += [(t, -1000.0, _USER_DEFINED) for t in USER_DEFINED]
    rows += [(f"<0x{byte:02X}>", 0.0, _BYTE) for byte in range(256)]
    rows += [(t, -float(i), _NORMAL) for i, t in enumerate([*LEARNT, *CHARACTERS])]
    tokens, scores, types = zip(*rows, strict=True)
    return list(tokens), list(scores), list(types)


def tiny_gemma3(seed: int = 0) -> Gemma3ForCausalLM:
    """Random weights that bf16 holds exactly, norms far from one, windows that end early."""
    config = Gemma3TextConfig(
        vocab_size=len(vocabulary()[0]),
        hidden_size=HIDDEN,
        intermediate_size=48,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=HEAD_DIM,
        query_pre_attn_scalar=HEAD_DIM,
        sliding_window=WINDOW,
        max_position_embeddings=256,
        bos_token_id=2,
        eos_token_id=1,
        pad_token_id=0,
    )
    model = Gemma3ForCausalLM(config).float().eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            values = torch.randn(parameter.shape, generator=generator)
            if name.endswith("norm.weight"):
                # 1 + weight must be exact too, as it goes through the file.
                parameter.copy_((values * 64).round().clamp(-255, 255) / 256)
            else:
                parameter.copy_((values * parameter.shape[-1] ** -0.5).bfloat16().float())
    return model


def write_gguf(model: Gemma3ForCausalLM, path: Path) -> None:
    """Pack ``model`` in float32, with llama.cpp's names and its norms of 1 + weight."""
    config = model.config
    writer = GGUFWriter(path, "gemma3")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(1_000_000.0)
    writer.add_sliding_window(WINDOW)
    tokens, scores, types = vocabulary()
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores(scores)
    writer.add_token_types(types)
    for key, token in (("bos", 2), ("eos", 1), ("unknown", 3), ("padding", 0)):
        writer.add_uint32(f"tokenizer.ggml.{key}_token_id", token)
    for name, value in model.state_dict().items():
        if name == "lm_head.weight":
            continue
        array = value.numpy()
        packed = array + np.float32(1) if name.endswith("norm.weight") else array
        writer.add_tensor(_gguf_name(name), packed)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _gguf_name(name: str) -> str:
    if name == "model.embed_tokens.weight":
        return "token_embd.weight"
    if name == "model.norm.weight":
        return "output_norm.weight"
    _, _, index, module = name.split(".", 3)
    kinds = {
        "input_layernorm": "attn_norm",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "self_attn.q_norm": "attn_q_norm",
        "self_attn.k_norm": "attn_k_norm",
        "post_attention_layernorm": "post_attention_norm",
        "pre_feedforward_layernorm": "ffn_norm",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
        "post_feedforward_layernorm": "post_ffw_norm",
    }
    return f"blk.{index}.{kinds[module.removesuffix('.weight')]}.weight"
