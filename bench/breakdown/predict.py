"""The arithmetic model's figures beside a measurement."""

import dataclasses

from bench.breakdown.parts import Key, Split, Work
from sgl_frspec.explain import CycleCost, Device, Head, ModelShape, Speculation, cycle_cost


def with_prediction(split: Split, shape: ModelShape, device: Device, spec: Speculation) -> Split:
    """The split with the model's bytes, operations and times.

    FRSPEC is held to its fused head, all others to the chain of kernels; the eager loop has
    products of its own for query, key, value, gate and up. A vocabulary wider than the model's is
    that of a wider draft head alone.
    """
    head: Head = "fused" if split.implementation.startswith("frspec") else "chain"
    merged = not split.implementation.startswith("eager")

    def cost(shape: ModelShape, vocab: int) -> CycleCost:
        own = dataclasses.replace(spec, draft_vocab=vocab)
        return cycle_cost(shape, device, own, head=head, merged_products=merged)

    wide = dataclasses.replace(shape, vocab=max(split.vocab, shape.vocab))
    draft = [p for p in cost(wide, split.vocab).parts if p.phase == "draft"]
    verify = [p for p in cost(shape, min(split.vocab, shape.vocab)).parts if p.phase == "verify"]
    work = {
        (p.phase, p.name): Work(
            p.nbytes, p.flops, 1e6 * p.seconds, 1e6 * p.expected_s, p.memory_bound
        )
        for p in (*draft, *verify)
    }
    return dataclasses.replace(
        split, work=work, expected_products=_products(shape, spec, fused=head == "fused")
    )


def _products(shape: ModelShape, spec: Speculation, *, fused: bool) -> dict[Key, float]:
    """Matrix products of a server's cycle; a fused head is none."""
    one_layer = {"attention projections": 2, "MLP": 2}  # query with key and value, gate with up
    counts: dict[Key, float] = {("verify", "LM head"): 1, ("draft", "fc"): spec.steps}
    counts["draft", "LM head"] = 0 if fused else spec.steps
    for part, count in one_layer.items():
        counts["draft", part] = count * spec.steps
        counts["verify", part] = count * shape.layers
    return counts
