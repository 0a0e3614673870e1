"""The EAGLE-2 draft as SGLang's ``LlamaForCausalLMEagle`` computes it.

``x_i = fc([embed(t_{i+1}) ; h_i])`` at position i, then one Llama layer without an input norm, and
no final norm: its output is both the next step's hidden state and the input of the target's head.
``h_i`` is the target's last hidden state after the final norm while the target has seen token i,
and the draft's own output beyond.

B batch, L positions, S keys, H hidden size, D head size.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save
from torch import nn

from sgl_frspec.maps.files import atomic_file


@dataclass(frozen=True)
class DraftConfig:
    """Sizes of the draft; ``vocab_size`` is the target's."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int

    @classmethod
    def like(cls, target: Any) -> "DraftConfig":
        """Take every size from a Hugging Face configuration of the target."""
        rope = getattr(target, "rope_parameters", None) or {}
        # Models with sliding layers rotate by kind of layer; the draft reads the whole context.
        rope = rope.get("full_attention", rope)
        theta = rope.get("rope_theta") or getattr(target, "rope_theta", None)
        if theta is None:
            raise ValueError("the target's configuration states no single rope_theta")
        names = [n for n in cls.__dataclass_fields__ if n not in ("rope_theta", "head_dim")]
        values = {name: getattr(target, name) for name in names}
        head_dim = getattr(target, "head_dim", None)
        values["head_dim"] = head_dim or target.hidden_size // target.num_attention_heads
        return cls(rope_theta=float(theta), **values)


def rotate(x: torch.Tensor, positions: torch.Tensor, theta: float) -> torch.Tensor:
    """Apply rotary embedding (halves layout) to ``[B, heads, L, D]`` at ``[B or 1, L]``."""
    half = x.shape[-1] // 2
    exponents = torch.arange(half, device=x.device, dtype=torch.float32) / half
    angles = positions[:, None, :, None].float() / theta**exponents
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    a, b = x[..., :half], x[..., half:]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


class Attention(nn.Module):
    """Grouped-query attention; keys and values come from the caller."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.config = config
        queries = config.num_attention_heads * config.head_dim
        shared = config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, queries, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, shared, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, shared, bias=False)
        self.o_proj = nn.Linear(queries, config.hidden_size, bias=False)

    def project(
        self, x: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return queries ``[B, heads, L, D]``, keys and values ``[B, kv_heads, L, D]``."""
        c = self.config

        def heads(y: torch.Tensor) -> torch.Tensor:
            return y.unflatten(-1, (-1, c.head_dim)).transpose(1, 2)

        query = rotate(heads(self.q_proj(x)), positions, c.rope_theta)
        key = rotate(heads(self.k_proj(x)), positions, c.rope_theta)
        return query, key, heads(self.v_proj(x))

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor
    ) -> torch.Tensor:
        """Attend from L queries to S keys; ``mask`` broadcasts to ``[B, heads, L, S]``."""
        groups = self.config.num_attention_heads // self.config.num_key_value_heads
        key, value = (t.repeat_interleave(groups, dim=1) for t in (key, value))
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        return self.o_proj(out.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    """The gated feed-forward part."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map ``[..., H]`` to ``[..., H]``."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DraftLayer(nn.Module):
    """One Llama layer whose input norm is the identity."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = Mlp(config)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)


class EagleDraft(nn.Module):
    """The draft without embedding and head, which are the target's."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.config = config
        # SGLang's fc has a bias, so the checkpoint must carry one.
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size)
        self.layers = nn.ModuleList([DraftLayer(config)])

    @property
    def layer(self) -> DraftLayer:
        """The only layer."""
        layer = self.layers[0]
        assert isinstance(layer, DraftLayer)
        return layer

    def mix(self, embedding: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Combine ``[..., H]`` embeddings of the next tokens with hidden states."""
        return self.fc(torch.cat((embedding, hidden.to(embedding.dtype)), dim=-1))

    def finish(self, x: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """The rest of the layer after attention: residual, norm, MLP, residual."""
        x = x + attended
        norm = self.layer.post_attention_layernorm
        # Under autocast x is bf16; one type for both is what lets PyTorch fuse the norm.
        normed = F.rms_norm(x, norm.normalized_shape, norm.weight.to(x.dtype), norm.eps)
        return x + self.layer.mlp(normed)


def embedding_factor(target: Any) -> float:
    """What a target multiplies its stored embedding by (Gemma: the root of its hidden size)."""
    return float(getattr(target.get_input_embeddings(), "embed_scale", 1.0))


def save_draft(draft: EagleDraft, folder: Path, embedding_factor: float = 1.0) -> None:
    """Write ``config.json`` and bf16 ``model.safetensors`` as SGLang loads them.

    SGLang gives the draft the target's stored embedding, and its Llama draft multiplies it by
    nothing. A draft that was trained on the multiplied one carries ``embedding_factor`` in ``fc``,
    which reads nothing but embedding and hidden state and is linear.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLMEagle"],
        "model_type": "llama",
        **asdict(draft.config),
        "num_hidden_layers": 1,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        # The head is the target's; a tied head could not be cut to a token map.
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    state = draft.state_dict()
    embedding, hidden = state["fc.weight"].detach().chunk(2, dim=1)
    state["fc.weight"] = torch.cat((embedding * embedding_factor, hidden), dim=1)
    weights = {k: v.detach().to(torch.bfloat16).cpu() for k, v in state.items()}
    with atomic_file(folder / "model.safetensors") as file:
        file.write(save(weights, metadata={"format": "pt"}))


def load_draft(folder: Path, dtype: torch.dtype = torch.float32) -> EagleDraft:
    """Read a folder written by :func:`save_draft`."""
    values = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    fields = DraftConfig.__dataclass_fields__
    draft = EagleDraft(DraftConfig(**{k: v for k, v in values.items() if k in fields}))
    draft.load_state_dict(load_file(folder / "model.safetensors"))
    return draft.to(dtype)
