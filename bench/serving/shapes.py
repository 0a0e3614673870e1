"""Model shapes for serving measurements, with what a server of each needs in memory."""

from dataclasses import dataclass

BF16_BYTES = 2
FP32_BYTES = 4


@dataclass(frozen=True)
class Shape:
    """Dimensions of a Llama-architecture target; its draft is one such layer.

    Attributes:
        name: what ``--shape`` calls it.
        source: the published model whose dimensions these are.
        heads, kv_heads, head_dim: of attention; ``heads * head_dim`` may differ from ``hidden``.
        hot: how many ids the token map holds.
        dtype: ``bfloat16``, or ``float32`` for the one that runs on a CPU.
    """

    name: str
    source: str
    vocab: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    hot: int = 32_768
    dtype: str = "bfloat16"

    @property
    def element_bytes(self) -> int:
        """Bytes of one weight."""
        return BF16_BYTES if self.dtype == "bfloat16" else FP32_BYTES

    @property
    def layer_weights(self) -> int:
        """Weights in the matrices of one layer."""
        attention = self.hidden * self.head_dim * 2 * (self.heads + self.kv_heads)
        return attention + 3 * self.hidden * self.intermediate

    @property
    def weight_bytes(self) -> int:
        """Target and draft; the draft shares the target's embedding and full head."""
        tables = 2 * self.vocab * self.hidden
        draft = self.layer_weights + 2 * self.hidden * self.hidden + self.hot * self.hidden
        return (tables + self.layers * self.layer_weights + draft) * self.element_bytes

    @property
    def kv_bytes_per_token(self) -> int:
        """Keys and values of the target's layers and of the draft's one, for one token."""
        return (self.layers + 1) * 2 * self.kv_heads * self.head_dim * self.element_bytes


SHAPES = {
    shape.name: shape
    for shape in (
        Shape("1b", "Llama-3.2-1B, untied", 128_256, 2_048, 8_192, 16, 32, 8, 64),
        Shape("8b", "Llama-3-8B", 128_256, 4_096, 14_336, 32, 32, 8, 128),
        Shape("256k", "Gemma-2-2B's, Llama architecture", 256_000, 2_304, 9_216, 26, 8, 4, 256),
        Shape("tiny", "none: for a CPU", 2_048, 128, 128, 2, 4, 2, 32, hot=1_024, dtype="float32"),
    )
}
REAL_MODEL = "smollm2"
