"""What one speculative cycle must move and multiply, part by part.

An EAGLE-2 draft is one decoder layer of the target's sizes with a projection of 2 x hidden to
hidden in front and the target's LM head behind it. A cycle runs it ``steps`` times, then the target
once over the tree. Weights are read once per run, whatever the number of rows; the cache of a
request's context is read once for all of its nodes. Everything that stays on the chip costs
nothing, so the result is a floor: launches, waiting for the host and partly filled GPUs come on
top. Numbers are bf16 (2 bytes); probabilities fp32.
"""

from dataclasses import dataclass
from typing import Literal

from sgl_frspec.explain.device import Device
from sgl_frspec.explain.model_shape import ModelShape

BF16 = 2
FP32 = 4

Head = Literal["chain", "fused"]


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


@dataclass(frozen=True)
class Part:
    """One kind of work in a cycle, summed over its runs: bytes, operations, seconds."""

    phase: Literal["draft", "verify"]
    name: str
    nbytes: float
    flops: float
    seconds: float


@dataclass(frozen=True)
class CycleCost:
    """The parts of a cycle in the order in which they run."""

    parts: tuple[Part, ...]

    def seconds(self, phase: str | None = None, *names: str) -> float:
        """Time of a phase, or of the named parts in it; of everything by default."""
        return sum(
            part.seconds
            for part in self.parts
            if phase in (None, part.phase) and (not names or part.name in names)
        )


class _Ledger:
    """Adds up work by part, keeping the order of first appearance."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._parts: dict[tuple[Literal["draft", "verify"], str], list[float]] = {}

    def add(
        self,
        phase: Literal["draft", "verify"],
        name: str,
        nbytes: float,
        flops: float = 0.0,
        runs: int = 1,
    ) -> None:
        total = self._parts.setdefault((phase, name), [0.0, 0.0, 0.0])
        total[0] += runs * nbytes
        total[1] += runs * flops
        total[2] += runs * self._device.seconds(nbytes, flops)

    def close(self) -> CycleCost:
        return CycleCost(
            tuple(Part(phase, name, *total) for (phase, name), total in self._parts.items())
        )


def cycle_cost(shape: ModelShape, device: Device, spec: Speculation, *, head: Head) -> CycleCost:
    """Bytes, operations and time of one draft of ``spec.steps`` steps and one verification.

    Args:
        shape: sizes of the target; the draft's layer has the same.
        device: what the GPU reaches.
        spec: tree, batch, context and draft vocabulary.
        head: what turns hidden states into draft tokens. ``"chain"`` is the stock sequence of
            product, fp32 cast, softmax and top-k with every intermediate written to memory,
            ``"fused"`` one pass over the head that writes k candidates a row.

    Raises:
        ValueError: if the draft vocabulary exceeds the target's.
    """
    if spec.draft_vocab > shape.vocab:
        raise ValueError(f"a draft vocabulary of {spec.draft_vocab} exceeds {shape.vocab} tokens")
    ledger = _Ledger(device)
    # The first step of a draft extends it by the tokens accepted last, of which only the newest
    # needs probabilities; each later step runs top-k branches of every request.
    _add_draft_steps(ledger, shape, spec, spec.batch, 1, head)
    _add_draft_steps(ledger, shape, spec, spec.batch * spec.top_k, spec.steps - 1, head)
    _add_verification(ledger, shape, spec)
    return ledger.close()


def _add_draft_steps(
    ledger: _Ledger, shape: ModelShape, spec: Speculation, rows: int, runs: int, head: Head
) -> None:
    hidden_bytes = rows * shape.hidden * BF16
    ledger.add("draft", "embedding", 2 * hidden_bytes, runs=runs)
    fc = 2 * shape.hidden**2
    ledger.add("draft", "fc", fc * BF16 + 3 * hidden_bytes, 2.0 * rows * fc, runs)
    _add_layers(ledger, "draft", shape, spec, rows, spec.context, runs)
    logits = rows * spec.draft_vocab
    weights = shape.hidden * spec.draft_vocab
    written = logits * BF16 if head == "chain" else 0
    ledger.add("draft", "LM head", weights * BF16 + written, 2.0 * rows * weights, runs)
    if head == "chain":
        # Cast (read bf16, write fp32) and softmax (read, write), then a read of everything.
        ledger.add("draft", "softmax", logits * (BF16 + 3 * FP32), runs=runs)
        ledger.add("draft", "top-k", logits * FP32, runs=runs)


def _add_verification(ledger: _Ledger, shape: ModelShape, spec: Speculation) -> None:
    rows = spec.batch * spec.nodes
    ledger.add("verify", "embedding", 2 * rows * shape.hidden * BF16)
    sliding = shape.layers - shape.full_layers
    _add_layers(ledger, "verify", shape, spec, rows, spec.context, shape.full_layers)
    if shape.window is not None:
        seen = min(spec.context, shape.window)
        _add_layers(ledger, "verify", shape, spec, rows, seen, sliding)
    logits = rows * shape.vocab
    weights = shape.head_weights
    ledger.add("verify", "LM head", (weights + logits) * BF16, 2.0 * rows * weights)
    ledger.add("verify", "acceptance", logits * BF16)


def _add_layers(
    ledger: _Ledger,
    phase: Literal["draft", "verify"],
    shape: ModelShape,
    spec: Speculation,
    rows: int,
    context: int,
    runs: int,
) -> None:
    hidden_bytes = rows * shape.hidden * BF16
    # Two norms, each with the residual: read both, write both.
    ledger.add(phase, "norms", 2 * 4 * hidden_bytes, runs=runs)
    projections = shape.attention_weights
    ledger.add(phase, "attention projections", projections * BF16, 2.0 * rows * projections, runs)
    cached = spec.batch * context * 2 * shape.kv_heads * shape.head_dim
    products = 4.0 * rows * context * shape.heads * shape.head_dim
    ledger.add(phase, "attention", cached * BF16, products, runs)
    ledger.add(phase, "MLP", shape.mlp_weights * BF16, 2.0 * rows * shape.mlp_weights, runs)
