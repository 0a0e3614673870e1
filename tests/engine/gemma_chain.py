"""The chain model as a tiny Gemma 3: scaled embedding, norms of 1 + weight, windows, heads of 256.

The last layer's MLP adds ``(R - 1) u`` to its input u. Gemma normalises what it adds, which a
constant factor undoes: ``|(R - 1) x|`` is the same for every x on an orbit of R. All attention, and
the MLPs before the last, add ``context`` times something that depends on earlier tokens.

The draft is the chain's: it reads the stored embedding, without Gemma's factor, which stands in its
``fc`` instead.
"""

from pathlib import Path

import torch

from tests.engine.chain_model import GATE, HIDDEN, Chain, make_chain_model, read, write

HEADS, KV_HEADS, HEAD_DIM, WINDOW = 2, 1, 256, 7
KINDS = ["sliding_attention", "full_attention", "sliding_attention"]


def make_gemma_chain(
    folder: Path, *, context: float = 0.0, noise: float = 0.0, hot_share: float = 0.7, seed: int = 0
) -> Chain:
    """Write target, draft and map under ``folder``."""
    # Llama's chain brings order, embedding, rotation, draft and map.
    chain = make_chain_model(folder, noise=0.0, hot_share=hot_share, tied=True, seed=seed)
    g = torch.Generator().manual_seed(seed + 1000)
    points = read(chain.target)["model.embed_tokens.weight"]
    draft = read(chain.draft)
    rotation = draft["fc.weight"][:, :HIDDEN].clone()
    factor = HIDDEN**0.5
    embedding = points / factor
    target = {"model.embed_tokens.weight": embedding, "model.norm.weight": torch.zeros(HIDDEN)}
    for index in range(len(KINDS)):
        target |= _layer(f"model.layers.{index}.", context, g)
    difference = rotation - torch.eye(HIDDEN)
    added = points[chain.order[0]] @ difference.T
    gate = torch.zeros(HIDDEN, HIDDEN)
    gate[:, 0] = GATE
    last = f"model.layers.{len(KINDS) - 1}."
    target |= {
        last + "pre_feedforward_layernorm.weight": torch.zeros(HIDDEN),
        last + "mlp.gate_proj.weight": gate,
        last + "mlp.up_proj.weight": difference,
        last + "mlp.down_proj.weight": torch.eye(HIDDEN) / GATE,
        last + "post_feedforward_layernorm.weight": torch.full(
            (HIDDEN,), float(added.pow(2).mean().sqrt()) - 1
        ),
    }
    write(chain.target, _config(len(points)), target)
    noisy = rotation + noise * torch.randn(HIDDEN, HIDDEN, generator=g)
    draft["fc.weight"][:, :HIDDEN] = noisy * factor
    draft["embed_tokens.weight"] = embedding
    write(chain.draft, None, draft)
    return chain


def _layer(prefix: str, context: float, g: torch.Generator) -> dict[str, torch.Tensor]:
    def random(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=g) / columns**0.5

    def norm(size: int) -> torch.Tensor:
        return 0.3 * torch.randn(size, generator=g)

    # Features that change must not reach the constant first one, which the last MLP's gate reads.
    scale = torch.full((HIDDEN,), context - 1)
    scale[0] = -1.0
    return {
        prefix + "self_attn.q_proj.weight": random(HEADS * HEAD_DIM, HIDDEN),
        prefix + "self_attn.k_proj.weight": random(KV_HEADS * HEAD_DIM, HIDDEN),
        prefix + "self_attn.v_proj.weight": random(KV_HEADS * HEAD_DIM, HIDDEN),
        prefix + "self_attn.o_proj.weight": random(HIDDEN, HEADS * HEAD_DIM),
        prefix + "self_attn.q_norm.weight": norm(HEAD_DIM),
        prefix + "self_attn.k_norm.weight": norm(HEAD_DIM),
        prefix + "mlp.gate_proj.weight": random(HIDDEN, HIDDEN),
        prefix + "mlp.up_proj.weight": random(HIDDEN, HIDDEN),
        prefix + "mlp.down_proj.weight": random(HIDDEN, HIDDEN),
        prefix + "input_layernorm.weight": norm(HIDDEN),
        prefix + "post_attention_layernorm.weight": scale,
        prefix + "pre_feedforward_layernorm.weight": norm(HIDDEN),
        prefix + "post_feedforward_layernorm.weight": scale.clone(),
    }


def _config(vocab: int) -> dict[str, object]:
    return {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "hidden_size": HIDDEN,
        "intermediate_size": HIDDEN,
        "num_hidden_layers": len(KINDS),
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "query_pre_attn_scalar": HEAD_DIM,
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 1024,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000.0,
        "rope_local_base_freq": 10_000.0,
        "sliding_window": WINDOW,
        "layer_types": KINDS,
        "attention_bias": False,
        "tie_word_embeddings": True,
        "vocab_size": vocab,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
        "torch_dtype": "float32",
    }
