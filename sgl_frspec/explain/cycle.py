"""What one speculative cycle must move and multiply, part by part.

An EAGLE-2 draft is one decoder layer of the target's sizes with a projection of 2 x hidden to
hidden in front and the target's LM head behind it. A cycle runs it ``steps`` times, then the target
once over the tree. Weights are read once per run, whatever the number of rows; the cache of a
request's context is read once for all of its nodes. Numbers are bf16 (2 bytes); probabilities fp32.

The *floor* of a part is the longer of streaming its bytes and doing its operations. The *expected*
time adds what each of its kernels takes to start and end, what matrix products lose beside a copy,
and what softmax loses because it works on as many rows at once as there are, one thread block each.
Waiting for the host comes on top of both.
"""

from dataclasses import dataclass
from typing import Literal

from sgl_frspec.explain.device import Device
from sgl_frspec.explain.ledger import BF16, CycleCost, Ledger, Matrix, Phase
from sgl_frspec.explain.model_shape import ModelShape

FP32 = 4

Head = Literal["chain", "fused"]
# Kernels beside the products, of a server: rotary embedding, store, attention over splits, merge;
# two norms with their residuals; the activation; cast and softmax; a top-k over large rows.
_ATTENTION_KERNELS, _NORM_KERNELS, _SOFTMAX_KERNELS, _TOPK_KERNELS = 4, 2, 2, 8
_MERGE_KERNELS = 1  # of the candidates of a fused head's slices


@dataclass(frozen=True)
class Speculation:
    """How the server speculates: ``draft_vocab`` rows in the draft's head, ``batch`` requests."""

    draft_vocab: int
    steps: int = 6
    top_k: int = 10
    nodes: int = 60
    batch: int = 1
    context: int = 300

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value < (0 if name == "context" else 1):
                raise ValueError(f"{name} is {value}; it must be positive")
        if self.top_k > self.draft_vocab:
            raise ValueError(f"top-k {self.top_k} exceeds the {self.draft_vocab} ids of the draft")


def cycle_cost(
    shape: ModelShape,
    device: Device,
    spec: Speculation,
    *,
    head: Head,
    merged_products: bool = True,
) -> CycleCost:
    """Bytes, operations and time of one draft of ``spec.steps`` steps and one verification.

    Args:
        shape: sizes of the target; the draft's layer has the same.
        device: what the GPU reaches.
        spec: tree, batch, context and draft vocabulary.
        head: what turns hidden states into draft tokens. ``"chain"`` is the stock sequence of
            product, fp32 cast, softmax and top-k with every intermediate written to memory,
            ``"fused"`` one pass over the head that writes k candidates a row.
        merged_products: whether query, key and value are one product and gate and up another, as
            servers have them, or each its own, as in transformers.

    Raises:
        ValueError: if the draft vocabulary exceeds the target's.
    """
    if spec.draft_vocab > shape.vocab:
        raise ValueError(f"a draft vocabulary of {spec.draft_vocab} exceeds {shape.vocab} tokens")
    ledger = Ledger(device)
    layers = _Layers(ledger, shape, spec, merged_products)
    # The first step of a draft extends it by the tokens accepted last, of which only the newest
    # needs probabilities; each later step runs top-k branches of every request.
    _add_draft_steps(layers, spec.batch, 1, head)
    _add_draft_steps(layers, spec.batch * spec.top_k, spec.steps - 1, head)
    _add_verification(layers)
    return ledger.close()


@dataclass(frozen=True)
class _Layers:
    """Decoder layers of one shape, to be added to a ledger."""

    ledger: Ledger
    shape: ModelShape
    spec: Speculation
    merged_products: bool

    def add(self, phase: Phase, rows: int, context: int, runs: int) -> None:
        ledger, shape = self.ledger, self.shape
        hidden_bytes = rows * shape.hidden * BF16
        # Two norms, each with the residual: read both, write both.
        ledger.add(phase, "norms", 2 * 4 * hidden_bytes, runs=runs, kernels=_NORM_KERNELS)
        ledger.add_products(phase, "attention projections", rows, self._projections(), runs)
        cached = self.spec.batch * context * 2 * shape.kv_heads * shape.head_dim
        scores = 4.0 * rows * context * shape.heads * shape.head_dim
        ledger.add(phase, "attention", cached * BF16, scores, runs, kernels=_ATTENTION_KERNELS)
        ledger.add_products(phase, "MLP", rows, self._mlp(), runs)
        ledger.add(phase, "MLP", 0.0, runs=runs, kernels=1 if self.merged_products else 2)

    def _projections(self) -> list[Matrix]:
        shape = self.shape
        heads, cached = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        apart = [heads, cached, cached]  # query, key, value
        into = [sum(apart)] if self.merged_products else apart
        return [*((columns, shape.hidden) for columns in into), (shape.hidden, heads)]

    def _mlp(self) -> list[Matrix]:
        hidden, inner = self.shape.hidden, self.shape.intermediate
        into = [2 * inner] if self.merged_products else [inner, inner]
        return [*((columns, hidden) for columns in into), (hidden, inner)]


def _add_draft_steps(layers: _Layers, rows: int, runs: int, head: Head) -> None:
    ledger, shape, spec = layers.ledger, layers.shape, layers.spec
    hidden_bytes = rows * shape.hidden * BF16
    ledger.add("draft", "embedding", 2 * hidden_bytes, runs=runs, kernels=1)
    ledger.add("draft", "fc", 3 * hidden_bytes, runs=runs, kernels=1)
    ledger.add_products("draft", "fc", rows, [(shape.hidden, 2 * shape.hidden)], runs)
    layers.add("draft", rows, spec.context, runs)
    logits = rows * spec.draft_vocab
    written = logits * BF16 if head == "chain" else 0
    head_matrix = [(spec.draft_vocab, shape.hidden)]
    ledger.add_products("draft", "LM head", rows, head_matrix, runs, more_bytes=written)
    if head == "fused":
        ledger.add("draft", "LM head", 0.0, runs=runs, kernels=_MERGE_KERNELS)
    else:
        # Cast (read bf16, write fp32) and softmax (read, write), then a read of everything. The
        # softmax's block reads its row three times: for the maximum, the sum and the result.
        moved = logits * (BF16 + 3 * FP32)
        row = 4 * FP32 * spec.draft_vocab
        ledger.add("draft", "softmax", moved, runs=runs, kernels=_SOFTMAX_KERNELS, row_bytes=row)
        ledger.add("draft", "top-k", logits * FP32, runs=runs, kernels=_TOPK_KERNELS)


def _add_verification(layers: _Layers) -> None:
    ledger, shape, spec = layers.ledger, layers.shape, layers.spec
    rows = spec.batch * spec.nodes
    ledger.add("verify", "embedding", 2 * rows * shape.hidden * BF16, kernels=1)
    layers.add("verify", rows, spec.context, shape.full_layers)
    if shape.window is not None:
        seen = min(spec.context, shape.window)
        layers.add("verify", rows, seen, shape.layers - shape.full_layers)
    written = rows * shape.vocab * BF16
    head_matrix = [(shape.vocab, shape.hidden)]
    ledger.add_products("verify", "LM head", rows, head_matrix, more_bytes=written)
    ledger.add("verify", "acceptance", written, kernels=2)
