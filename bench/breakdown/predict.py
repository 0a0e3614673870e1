"""The arithmetic model's figures beside a measurement."""

import dataclasses

from bench.breakdown.parts import Split, Work
from sgl_frspec.explain import Device, ModelShape, Speculation, cycle_cost


def with_prediction(split: Split, shape: ModelShape, device: Device, spec: Speculation) -> Split:
    """The split with the model's bytes, operations and least times.

    FRSPEC is held to its fused head, all others to the chain of kernels. A vocabulary wider than
    the model's is that of a wider draft head alone.
    """
    head = "fused" if split.implementation.startswith("frspec") else "chain"
    own = dataclasses.replace(spec, draft_vocab=min(split.vocab, shape.vocab))
    wide = dataclasses.replace(shape, vocab=max(split.vocab, shape.vocab))
    drafted = dataclasses.replace(spec, draft_vocab=split.vocab)
    draft = [p for p in cycle_cost(wide, device, drafted, head=head).parts if p.phase == "draft"]
    verify = [p for p in cycle_cost(shape, device, own, head=head).parts if p.phase == "verify"]
    work = {
        (part.phase, part.name): Work(part.nbytes, part.flops, 1e6 * part.seconds)
        for part in (*draft, *verify)
    }
    return dataclasses.replace(split, work=work)
