"""The arithmetic model's figures beside a measurement."""

import dataclasses

from bench.breakdown.parts import Split, Work
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
    parts = [p for p in cost(wide, split.vocab).parts if p.phase == "draft"]
    parts += [p for p in cost(shape, min(split.vocab, shape.vocab)).parts if p.phase == "verify"]
    work = {
        (p.phase, p.name): Work(
            p.nbytes, p.flops, 1e6 * p.seconds, 1e6 * p.expected_s, p.memory_bound
        )
        for p in parts
    }
    products = {(p.phase, p.name): float(p.products) for p in parts if p.products}
    if head == "fused":
        products["draft", "LM head"] = 0.0  # it is no kernel of the matrix library
    return dataclasses.replace(split, work=work, expected_products=products)
