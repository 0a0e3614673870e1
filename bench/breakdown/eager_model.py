"""Random decoders of a given shape, written as Hugging Face's transformers writes them.

One PyTorch operation after the other, each a launch of its own: norms in float32 with casts around
them, separate query, key, value, gate and up products, rotary embedding by halves, repeated key and
value heads, masks that are built as tensors. H is hidden size, D the size of a head, B requests,
R rows of one request, C its context.
"""

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.breakdown.ranges import Mark
from sgl_frspec.explain import ModelShape

Family = Literal["llama", "qwen3", "gemma3"]
EPS = 1e-6
THETA = 10_000.0


def family_of(config: str) -> Family:
    """How a model of this name departs from Llama's layers."""
    name = config.lower()
    return "qwen3" if "qwen3" in name else "gemma3" if "gemma-3" in name else "llama"


def random_weight(*size: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Normal values that keep activations near one."""
    return torch.empty(size, device=device, dtype=dtype).normal_(std=size[-1] ** -0.5)


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    """RMSNorm in float32, in six launches: square, mean, add, rsqrt, two products, and casts."""
    dtype = x.dtype
    wide = x.to(torch.float32)
    variance = wide.pow(2).mean(-1, keepdim=True)
    return weight * (wide * torch.rsqrt(variance + EPS)).to(dtype)


def rotary(positions: Tensor, head_dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosine and sine, each (B, 1, R, D), of positions (B, R)."""
    exponents = torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32)
    angles = positions[..., None].float() * THETA ** (-exponents / head_dim)
    angles = torch.cat((angles, angles), dim=-1)[:, None]
    return angles.cos().to(dtype), angles.sin().to(dtype)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def _repeat(x: Tensor, times: int) -> Tensor:
    """Key and value heads, once for each query head that uses them."""
    batch, heads, rows, size = x.shape
    wide = x[:, :, None].expand(batch, heads, times, rows, size)
    return wide.reshape(batch, heads * times, rows, size)


@dataclass
class Layer:
    """Weights and cache of one decoder layer.

    ``keys`` and ``values`` are (B, kv heads, longest, D), the context in front.
    """

    shape: ModelShape
    family: Family
    window: int | None
    weights: dict[str, Tensor]
    keys: Tensor
    values: Tensor

    def __call__(self, x: Tensor, run: "Run", phase: str) -> Tensor:
        """Attention and MLP with their residuals, over x (B, R, H)."""
        part, weights = run.mark, self.weights
        with part(phase, "norms"):
            normed = rms_norm(x, weights["input_norm"])
        attended = self._attention(normed, run, phase)
        with part(phase, "norms"):
            if self.family == "gemma3":
                attended = rms_norm(attended, weights["after_attention_norm"])
            x = x + attended
            normed = rms_norm(x, weights["mlp_norm"])
        with part(phase, "MLP"):
            gate = F.linear(normed, weights["gate"])
            gate = F.gelu(gate, approximate="tanh") if self.family == "gemma3" else F.silu(gate)
            out = F.linear(gate * F.linear(normed, weights["up"]), weights["down"])
        with part(phase, "norms"):
            if self.family == "gemma3":
                out = rms_norm(out, weights["after_mlp_norm"])
            return x + out

    def _attention(self, x: Tensor, run: "Run", phase: str) -> Tensor:
        part, weights, shape = run.mark, self.weights, self.shape
        batch, rows, _ = x.shape
        with part(phase, "attention projections"):
            q, k, v = (F.linear(x, weights[name]) for name in ("query", "key", "value"))
        with part(phase, "attention"):
            q, k, v = (t.view(batch, rows, -1, shape.head_dim).transpose(1, 2) for t in (q, k, v))
        if self.family != "llama":
            with part(phase, "norms"):
                q, k = rms_norm(q, weights["query_norm"]), rms_norm(k, weights["key_norm"])
        with part(phase, "attention"):
            q, k = _rotate(q, run.cos, run.sin), _rotate(k, run.cos, run.sin)
            begin, end = run.written, run.written + rows
            self.keys[:, :, begin:end].copy_(k)
            self.values[:, :, begin:end].copy_(v)
            times = shape.heads // shape.kv_heads
            keys, values = (_repeat(t[:, :, :end], times) for t in (self.keys, self.values))
            mask = run.mask if self.window is None else run.window_mask
            out = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask)
            out = out.transpose(1, 2).reshape(batch, rows, -1)
        with part(phase, "attention projections"):
            return F.linear(out, weights["output"])


@dataclass
class Run:
    """What the layers of one pass share.

    Attributes:
        mark: makes the range of a part.
        written: cache slots that are taken; this pass writes behind them.
        cos, sin: of the rows' positions.
        mask: (B, 1, R, written + R), what is added to the scores.
        window_mask: the same for layers with a sliding window.
    """

    mark: Mark
    written: int
    cos: Tensor
    sin: Tensor
    mask: Tensor
    window_mask: Tensor


def make_layer(
    shape: ModelShape,
    family: Family,
    *,
    full: bool,
    batch: int,
    longest: int,
    device: torch.device,
    dtype: torch.dtype,
) -> Layer:
    """A layer of random weights, with a cache of ``longest`` random entries a request."""
    hidden, head, inner = shape.hidden, shape.head_dim, shape.intermediate
    sizes = {
        "query": (shape.heads * head, hidden),
        "key": (shape.kv_heads * head, hidden),
        "value": (shape.kv_heads * head, hidden),
        "output": (hidden, shape.heads * head),
        "gate": (inner, hidden),
        "up": (inner, hidden),
        "down": (hidden, inner),
    }
    weights = {k: random_weight(*size, device=device, dtype=dtype) for k, size in sizes.items()}
    norms = ["input_norm", "mlp_norm"]
    norms += ["after_attention_norm", "after_mlp_norm"] if family == "gemma3" else []
    weights |= {name: torch.ones(hidden, device=device, dtype=dtype) for name in norms}
    if family != "llama":
        ones = {name: torch.ones(head, device=device, dtype=dtype) for name in _HEAD_NORMS}
        weights |= ones
    cache = (batch, shape.kv_heads, longest, head)
    keys, values = (random_weight(*cache, device=device, dtype=dtype) for _ in range(2))
    return Layer(shape, family, None if full else shape.window, weights, keys, values)


_HEAD_NORMS = ("query_norm", "key_norm")
