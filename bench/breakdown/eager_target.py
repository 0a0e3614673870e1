"""The target of the eager loop: one pass over the nodes of all trees, and its cache."""

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from bench.breakdown.eager_model import Family, Layer, Run, rms_norm, rotary
from bench.breakdown.eager_tree import additive_mask
from bench.breakdown.ranges import Mark
from sgl_frspec.explain import ModelShape


@dataclass
class Target:
    """Weights of the target: embedding and head (V, H), the last norm's (H,), decoder layers."""

    shape: ModelShape
    family: Family
    context: int
    embedding: Tensor
    layers: list[Layer]
    norm: Tensor
    head: Tensor

    def verify(self, tokens: Tensor, depths: Tensor, seen: Tensor, mark: Mark) -> Tensor:
        """Logits (B, N, V) of the nodes.

        Args:
            tokens, depths: (B, N).
            seen: (B, N, N), which nodes a node sees.
            mark: makes the range of a part.
        """
        context, dtype = self.context, self.head.dtype
        with mark("verify", "embedding"):
            x = F.embedding(tokens, self.embedding)
            if self.family == "gemma3":
                x = x * self.shape.hidden**0.5
        with mark("verify", "attention"):
            cos, sin = rotary(depths + context, self.shape.head_dim, dtype)
            mask = windowed = additive_mask(seen, context, dtype)
            if self.shape.window is not None:
                windowed = additive_mask(seen, context, dtype, self.shape.window)
        run = Run(mark, context, cos, sin, mask, windowed)
        for layer in self.layers:
            x = layer(x, run, "verify")
        with mark("verify", "norms"):
            x = rms_norm(x, self.norm)
        with mark("verify", "LM head"):
            return F.linear(x, self.head)

    def compact(self, nodes: Tensor) -> None:
        """Move the keys and values of accepted nodes (B, path) to the front of the tree's."""
        context, path = self.context, nodes.shape[1]
        places = nodes.clamp_min(0)[:, None, :, None]
        for layer in self.layers:
            for cache in (layer.keys, layer.values):
                index = places.expand(-1, cache.shape[1], path, cache.shape[3])
                moved = cache[:, :, context:].gather(2, index)
                cache[:, :, context : context + path] = moved
