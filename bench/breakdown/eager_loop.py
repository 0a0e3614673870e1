"""An EAGLE-2 cycle as plain PyTorch: draft a tree, verify it, accept a path.

Weights and caches are random, so hardly anything is accepted; every shape is fixed, so the time
does not depend on what is. The context keeps its length: each cycle writes over the entries of the
one before.

Kinder to the host than EAGLE's reference code, which also builds tree masks and paths in Python:
here these are tensor operations, and the host waits once a cycle, for the accepted tokens.
"""

from functools import partial

import torch
from torch import Tensor

from bench.breakdown.eager_draft import Draft, DraftHead
from bench.breakdown.eager_model import Family, make_layer, random_weight
from bench.breakdown.eager_target import Target
from bench.breakdown.eager_tree import accept, ancestors, choose
from bench.breakdown.ranges import Mark, unmarked
from sgl_frspec.explain import ModelShape, Speculation


class EagerLoop:
    """Random target and draft of one shape, and the cycle over them."""

    def __init__(
        self,
        shape: ModelShape,
        family: Family,
        spec: Speculation,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        """Make weights and caches; the draft's head has ``spec.draft_vocab`` rows.

        Raises:
            ValueError: one step proposes fewer nodes than are to be verified.
        """
        candidates = spec.top_k + (spec.steps - 1) * spec.top_k**2
        if candidates < spec.nodes - 1:
            raise ValueError(
                f"{spec.steps} steps of top-k {spec.top_k} propose {candidates} nodes, fewer than "
                f"the {spec.nodes - 1} that are verified beside the root"
            )
        self.shape, self.spec = shape, spec
        weight = self._weight = partial(random_weight, device=device, dtype=dtype)
        longest = spec.context + max(spec.nodes, spec.steps + 1 + spec.steps * spec.top_k)
        layer = partial(
            make_layer,
            shape,
            family,
            batch=spec.batch,
            longest=longest,
            device=device,
            dtype=dtype,
        )
        self.target = Target(
            shape=shape,
            family=family,
            context=spec.context,
            embedding=weight(shape.vocab, shape.hidden),
            layers=[layer(full=_is_full(shape, i)) for i in range(shape.layers)],
            norm=torch.ones(shape.hidden, device=device, dtype=dtype),
            head=weight(shape.vocab, shape.hidden),
        )
        self.draft = Draft(
            spec=spec,
            embedding=self.target.embedding,
            fc=weight(shape.hidden, 2 * shape.hidden),
            layer=layer(full=True),
            head=self.make_head(spec.draft_vocab),
            hidden=weight(spec.batch, spec.steps + 1, shape.hidden),
            root=torch.zeros(spec.batch, 1, dtype=torch.int64, device=device),
        )

    def make_head(self, vocab: int) -> DraftHead:
        """A draft head of ``vocab`` rows: the target's, or random; more than it has are allowed."""
        head = self.target.head
        weight = head if vocab == len(head) else self._weight(vocab, self.shape.hidden)
        # A head wider than the target's can only be timed: its ids wrap around.
        ids = torch.arange(vocab, device=head.device) % self.shape.vocab
        return DraftHead(weight, ids.sort().values)

    def device_work(self, mark: Mark = unmarked) -> Tensor:
        """All GPU work of a cycle, none of it waited for: accepted tokens (B, S + 1), -1 behind."""
        steps = self.spec.steps
        tree = self.draft.grow(mark)
        with mark("draft", "tree"):
            tokens, parents, depths = choose(tree, self.draft.root, self.spec.nodes)
            seen = ancestors(parents, steps)
        logits = self.target.verify(tokens, depths, seen, mark)
        with mark("verify", "acceptance"):
            accepted, nodes = accept(tokens, parents, logits, steps)
        with mark("verify", "copies"):
            self.target.compact(nodes)
        return accepted

    def cycle(self, mark: Mark = unmarked) -> list[list[int]]:
        """One cycle with its one wait for the GPU."""
        accepted = self.device_work(mark)
        with mark("verify", "acceptance"):
            return accepted.tolist()


def _is_full(shape: ModelShape, layer: int) -> bool:
    """Whether a layer attends to everything: every n-th does where there is a window."""
    if shape.window is None:
        return True
    every = shape.layers // max(1, shape.full_layers)
    return (layer + 1) % every == 0
