"""A tiny Llama whose greedy output is known, an EAGLE draft that knows it too, and a token map.

Token embeddings lie on an orbit of a rotation R: the embedding of the i-th token of the chain is
``R^i e``. The target's MLP multiplies its input by R, so its head, tied or not, continues the
chain up to its last token.
Its attention adds ``context`` times something that depends on all earlier tokens: with ``context``
above 0 the output shows whether the cache is right, though it is no longer known beforehand.

The draft computes ``(R + noise) embedding``: with noise 0 it is right wherever the next token lies
in the map.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

HIDDEN, HEADS, KV_HEADS, HEAD_DIM = 64, 4, 2, 16
# The MLP's gate reads the constant first feature; silu of a large number is that number.
GATE = 20.0


@dataclass(frozen=True)
class Chain:
    """Where the models lie and what they do.

    Attributes:
        target, draft, token_map: paths.
        order: int64 ``[V]``, the tokens in the order in which they follow each other.
        hot: bool ``[V]``, which tokens are in the map.
    """

    target: Path
    draft: Path
    token_map: Path
    order: torch.Tensor
    hot: torch.Tensor

    def continuation(self, token: int, length: int) -> list[int]:
        """The ``length`` tokens after ``token``."""
        start = int((self.order == token).nonzero()) + 1
        if start + length > len(self.order):
            raise ValueError(f"only {len(self.order) - start} tokens follow {token}, not {length}")
        return self.order[start : start + length].tolist()

    def cycle_lengths(self, prompt_end: int, length: int, steps: int) -> list[int]:
        """Tokens that each cycle yields after the first token, by the definition of acceptance."""
        tokens = self.continuation(prompt_end, length + steps + 1)
        done, cycles = 1, []
        while done < length:
            accepted = 0
            while accepted < steps and bool(self.hot[tokens[done + accepted]]):
                accepted += 1
            cycles.append(accepted + 1)
            done += accepted + 1
        return cycles


def make_chain_model(
    folder: Path,
    *,
    vocab: int = 512,
    hot_share: float = 0.7,
    tied: bool = False,
    context: float = 0.0,
    noise: float = 0.0,
    seed: int = 0,
) -> Chain:
    """Write target, draft and map under ``folder``."""
    g = torch.Generator().manual_seed(seed)
    order = torch.randperm(vocab, generator=g)
    rotation = _rotation(g)
    embedding = torch.zeros(vocab, HIDDEN)
    point = torch.nn.functional.normalize(torch.randn(HIDDEN - 1, generator=g), dim=0)
    for token in order.tolist():
        embedding[token, 0] = 1.0
        embedding[token, 1:] = point * (HIDDEN - 1) ** 0.5
        point = rotation[1:, 1:] @ point
    hot = torch.zeros(vocab, dtype=torch.bool)
    hot[torch.randperm(vocab, generator=g)[: int(hot_share * vocab)]] = True

    config = _config(vocab, tied)
    target = {"model.embed_tokens.weight": embedding, "model.norm.weight": torch.ones(HIDDEN)}
    target |= _layer("model.layers.0.", rotation, context, g)
    if not tied:
        target["lm_head.weight"] = embedding.clone()
    fc = torch.zeros(HIDDEN, 2 * HIDDEN)
    fc[:, :HIDDEN] = rotation + noise * torch.randn(HIDDEN, HIDDEN, generator=g)
    draft = {"fc.weight": fc, "fc.bias": torch.zeros(HIDDEN), "embed_tokens.weight": embedding}
    layer = _layer("layers.0.", torch.eye(HIDDEN), 0.0, g)
    draft |= {k: v for k, v in layer.items() if "input_layernorm" not in k}
    write(folder / "target", config, target)
    write(folder / "draft", config | {"architectures": ["LlamaForCausalLMEagle"]}, draft)
    token_map = folder / "map.pt"
    # In no particular order: rank order is not id order.
    torch.save(hot.nonzero().flatten().flip(0).tolist(), token_map)
    return Chain(folder / "target", folder / "draft", token_map, order, hot)


def _rotation(g: torch.Generator) -> torch.Tensor:
    """Orthogonal, leaving the first feature alone. A product of few reflections repeats itself."""
    orthogonal, _ = torch.linalg.qr(torch.randn(HIDDEN - 1, HIDDEN - 1, generator=g))
    rotation = torch.eye(HIDDEN)
    rotation[1:, 1:] = orthogonal
    return rotation


def _layer(
    prefix: str, rotation: torch.Tensor, context: float, g: torch.Generator
) -> dict[str, torch.Tensor]:
    def random(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=g) / columns**0.5

    gate = torch.zeros(HIDDEN, HIDDEN)
    gate[:, 0] = GATE
    return {
        prefix + "self_attn.q_proj.weight": random(HEADS * HEAD_DIM, HIDDEN),
        prefix + "self_attn.k_proj.weight": random(KV_HEADS * HEAD_DIM, HIDDEN),
        prefix + "self_attn.v_proj.weight": random(KV_HEADS * HEAD_DIM, HIDDEN),
        prefix + "self_attn.o_proj.weight": context * random(HIDDEN, HEADS * HEAD_DIM),
        prefix + "mlp.gate_proj.weight": gate,
        # x + down(silu(gate) * up(x)) = x + (R - 1) x, since every embedding has RMS 1.
        prefix + "mlp.up_proj.weight": rotation - torch.eye(HIDDEN),
        prefix + "mlp.down_proj.weight": torch.eye(HIDDEN) / GATE,
        prefix + "input_layernorm.weight": torch.ones(HIDDEN),
        prefix + "post_attention_layernorm.weight": torch.ones(HIDDEN),
    }


def _config(vocab: int, tied: bool) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": HIDDEN,
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "max_position_embeddings": 1024,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": tied,
        "vocab_size": vocab,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "torch_dtype": "float32",
    }


def write(folder: Path, config: dict[str, object] | None, tensors: dict[str, torch.Tensor]) -> None:
    """Write a model's folder; without a configuration the one there stays."""
    folder.mkdir(parents=True, exist_ok=True)
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config, indent=1))
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(contiguous, folder / "model.safetensors", metadata={"format": "pt"})


def read(folder: Path) -> dict[str, torch.Tensor]:
    """The tensors of a model's folder."""
    return load_file(folder / "model.safetensors")
