"""The explanation as text."""

from collections.abc import Iterator, Mapping

from sgl_frspec.explain.cycle import Speculation
from sgl_frspec.explain.device import Device
from sgl_frspec.explain.ledger import CycleCost
from sgl_frspec.explain.line import VocabularyLine
from sgl_frspec.explain.model_shape import ModelShape

HEAD_PARTS = ("LM head", "softmax", "top-k")


def render(
    shape: ModelShape,
    device: Device,
    spec: Speculation,
    columns: Mapping[str, CycleCost],
    line: VocabularyLine,
) -> str:
    """A table of parts against ``columns``, and the sentences that follow from it."""
    head_layers = shape.head_weights / shape.layer_weights
    lines = [
        f"{device.name}: {device.bytes_per_s / 1e12:.2f} TB/s, "
        f"{device.flops_per_s / 1e15:.2f} PFLOP/s reachable",
        f"{spec.steps} steps, top-k {spec.top_k}, {spec.nodes} nodes, batch {spec.batch}, "
        f"context {spec.context}; {shape.vocab:,} tokens, map of {spec.draft_vocab:,}",
        "Expected microseconds: bytes or operations, whichever takes longer, and the start of each",
        "kernel. Waiting for the host comes on top. * marks parts whose time is mostly bytes.",
        "",
        *_table(columns),
        "",
        *_shares(columns),
        "",
        f"The head weighs as much as {head_layers:.1f} decoder layers; {spec.steps} draft steps "
        f"read as much as {spec.steps * head_layers:.1f} layers of heads, the target has "
        f"{shape.layers} layers.",
        f"Cycle = {1e3 * line.fixed_s:.2f} ms + {1e6 * line.per_token_s:.4f} ms x V/1000 on the "
        f"stock chain (R^2 {line.r_squared:.4f}).",
        f"At an unchanged accept length no map can gain more than "
        f"{line.ceiling(shape.vocab):.2f}x over {shape.vocab:,} tokens.",
    ]
    return "\n".join(lines)


def _table(columns: Mapping[str, CycleCost]) -> Iterator[str]:
    costs = list(columns.values())
    yield f"{'':<32}" + "".join(f"{name:>14}" for name in columns) + f"{'MB':>10}"
    for part in costs[0].parts:
        cells = "".join(f"{1e6 * cost.expected_s(part.phase, part.name):>14.1f}" for cost in costs)
        name = f"{part.phase} {part.name}{' *' if part.memory_bound else ''}"
        yield f"{name:<32}{cells}{part.nbytes / 1e6:>10.1f}"
    for phase in ("draft", "verify", None):
        cells = "".join(f"{1e6 * cost.expected_s(phase):>14.1f}" for cost in costs)
        yield f"{phase + ' total' if phase else 'cycle':<32}{cells}"
    cells = "".join(f"{1e6 * cost.seconds():>14.1f}" for cost in costs)
    yield f"{'of it bytes and operations':<32}{cells}"


def _shares(columns: Mapping[str, CycleCost]) -> Iterator[str]:
    for name, cost in columns.items():
        head, draft = cost.expected_s("draft", *HEAD_PARTS), cost.expected_s("draft")
        yield (
            f"{name}: draft head, softmax and top-k are {head / draft:.0%} of the draft and "
            f"{head / cost.expected_s():.0%} of the cycle"
        )
