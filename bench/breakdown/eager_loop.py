"""An EAGLE-2 cycle as plain PyTorch: draft a tree, verify it, accept a path.

B requests, K branches a step, S steps, N verified nodes, V ids of the draft. Weights and caches are
random, so hardly anything is accepted; every shape is fixed, so the time does not depend on what
is. The context keeps its length: each cycle writes over the entries of the one before.

Kinder to the host than EAGLE's reference code, which also builds tree masks and paths in Python:
here these are tensor operations, and the host waits once a cycle, for the accepted tokens.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.breakdown.eager_model import (
    Family,
    Layer,
    Run,
    make_layer,
    random_weight,
    rms_norm,
    rotary,
)
from bench.breakdown.ranges import Mark, unmarked
from sgl_frspec.explain import ModelShape, Speculation


@dataclass
class Tree:
    """Candidates of all steps, before the best N - 1 are chosen.

    Attributes:
        tokens, scores, parents, depths: (B, all candidates); a parent is an index in here, -1 the
            root.
    """

    tokens: Tensor
    scores: Tensor
    parents: Tensor
    depths: Tensor


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
        self.shape, self.family, self.spec = shape, family, spec
        self._device, self._dtype = device, dtype
        candidates = spec.top_k + (spec.steps - 1) * spec.top_k**2
        if candidates < spec.nodes - 1:
            raise ValueError(
                f"{spec.steps} steps of top-k {spec.top_k} propose {candidates} nodes, fewer than "
                f"the {spec.nodes - 1} that are verified beside the root"
            )
        weight = {"device": device, "dtype": dtype}
        longest = spec.context + max(spec.nodes, spec.steps + 1 + spec.steps * spec.top_k)
        cache = {"batch": spec.batch, "longest": longest, **weight}
        self._embedding = random_weight(shape.vocab, shape.hidden, **weight)
        self._head = random_weight(shape.vocab, shape.hidden, **weight)
        self._norm = torch.ones(shape.hidden, **weight)
        self._layers: list[Layer] = [
            make_layer(shape, family, full=self._is_full(i), **cache) for i in range(shape.layers)
        ]
        self._fc = random_weight(shape.hidden, 2 * shape.hidden, **weight)
        self._draft_layer = make_layer(shape, family, full=True, **cache)
        self.set_draft_vocab(spec.draft_vocab)
        self._root = torch.zeros(spec.batch, 1, dtype=torch.int64, device=device)
        self._hidden = random_weight(spec.batch, spec.steps + 1, shape.hidden, **weight)

    def set_draft_vocab(self, vocab: int) -> None:
        """Give the draft a head of ``vocab`` random rows; more than the target has are allowed."""
        weight = {"device": self._device, "dtype": self._dtype}
        self.draft_vocab = vocab
        if vocab == self.shape.vocab:
            self._draft_head = self._head
        else:
            self._draft_head = random_weight(vocab, self.shape.hidden, **weight)
        # A head wider than the target's can only be timed: its ids wrap around.
        ids = torch.arange(vocab, device=self._device) % self.shape.vocab
        self._hot_ids = ids.sort().values

    def _is_full(self, layer: int) -> bool:
        if self.shape.window is None:
            return True
        every = self.shape.layers // max(1, self.shape.full_layers)
        return (layer + 1) % every == 0

    def device_work(self, mark: Mark = unmarked) -> Tensor:
        """All GPU work of a cycle, none of it waited for: accepted tokens (B, S + 1), -1 behind."""
        tree = self._draft(mark)
        with mark("draft", "tree"):
            tokens, parents, depths = self._choose(tree)
            seen = self._ancestors(parents)
        logits = self._verify(tokens, depths, seen, mark)
        with mark("verify", "acceptance"):
            accepted, nodes = self._accept(tokens, parents, logits)
        with mark("verify", "copies"):
            self._compact(nodes)
        return accepted

    def cycle(self, mark: Mark = unmarked) -> list[list[int]]:
        """One cycle with its one wait for the GPU."""
        accepted = self.device_work(mark)
        with mark("verify", "acceptance"):
            return accepted.tolist()

    # Drafting

    def _draft(self, mark: Mark) -> Tree:
        spec, batch, k = self.spec, self.spec.batch, self.spec.top_k
        context, extended = spec.context, spec.steps + 1
        with mark("draft", "tree"):
            tokens = self._root.expand(batch, extended)
            places = torch.arange(context, context + extended, device=self._device)
            positions = places.expand(batch, extended)
            mask = self._causal(context, extended)
        hidden = self._draft_pass(tokens, self._hidden, positions, context, mask, mark)
        last = hidden[:, -1:]
        log_probs, ids = self._propose(last, mark)
        with mark("draft", "tree"):
            scores, tokens = log_probs[:, 0], ids[:, 0]
            grown = [Tree(tokens, scores, torch.full_like(tokens, -1), torch.ones_like(tokens))]
            hidden = last.expand(batch, k, -1)
            frontier = torch.arange(k, device=self._device).expand(batch, k)
            seen = torch.eye(k, dtype=torch.bool, device=self._device).expand(batch, k, k)
            first = k
        for step in range(1, spec.steps):
            with mark("draft", "tree"):
                positions = torch.full_like(tokens, context + extended + step - 1)
                mask = self._branch_mask(seen)
            written = context + extended + (step - 1) * k
            hidden = self._draft_pass(tokens, hidden, positions, written, mask, mark)
            log_probs, ids = self._propose(hidden, mark)
            with mark("draft", "tree"):
                reached = (scores[..., None] + log_probs).flatten(1)
                parents = frontier.repeat_interleave(k, dim=1)
                children = ids.flatten(1)
                depths = torch.full_like(children, step + 1)
                grown.append(Tree(children, reached, parents, depths))
                scores, chosen = reached.topk(k, dim=-1)
                tokens = children.gather(1, chosen)
                above = chosen // k
                hidden = hidden.gather(1, above[..., None].expand_as(hidden))
                frontier, first = first + chosen, first + k * k
                own = torch.eye(k, dtype=torch.bool, device=self._device).expand(batch, k, k)
                past = seen.gather(1, above[..., None].expand(batch, k, seen.shape[2]))
                seen = torch.cat((past, own), dim=2)
        with mark("draft", "tree"):
            columns = zip(*((t.tokens, t.scores, t.parents, t.depths) for t in grown), strict=True)
            return Tree(*(torch.cat(column, dim=1) for column in columns))

    def _draft_pass(
        self,
        tokens: Tensor,
        hidden: Tensor,
        positions: Tensor,
        written: int,
        mask: Tensor,
        mark: Mark,
    ) -> Tensor:
        with mark("draft", "embedding"):
            embedded = F.embedding(tokens, self._embedding)
        with mark("draft", "fc"):
            x = F.linear(torch.cat((embedded, hidden), dim=-1), self._fc)
        with mark("draft", "attention"):
            cos, sin = rotary(positions, self.shape.head_dim, self._dtype)
        return self._draft_layer(x, Run(mark, written, cos, sin, mask, mask), "draft")

    def _propose(self, hidden: Tensor, mark: Mark) -> tuple[Tensor, Tensor]:
        """Log-probabilities and token ids (B, R, K) of the best successors of each row."""
        with mark("draft", "LM head"):
            logits = F.linear(hidden, self._draft_head)
        with mark("draft", "softmax"):
            log_probs = F.log_softmax(logits.float(), dim=-1)
        with mark("draft", "top-k"):
            best, rows = log_probs.topk(self.spec.top_k, dim=-1)
            return best, self._hot_ids[rows]

    def _causal(self, context: int, rows: int) -> Tensor:
        """Scores' mask (B, 1, rows, context + rows) of a chain behind a context."""
        chain = torch.ones(rows, rows, dtype=torch.bool, device=self._device).tril()
        return self._additive(chain.expand(self.spec.batch, rows, rows), context)

    def _branch_mask(self, seen: Tensor) -> Tensor:
        return self._additive(seen, self.spec.context + self.spec.steps + 1)

    def _additive(self, seen: Tensor, context: int, window: int | None = None) -> Tensor:
        """0 where a row sees an entry, -inf elsewhere; all of the context, or its last ``window``.

        Args:
            seen: (B, R, entries behind the context).
            context: entries in front of these.
            window: of a layer with a sliding window.
        """
        batch, rows, entries = seen.shape
        mask = torch.full(
            (batch, 1, rows, context + entries),
            float("-inf"),
            device=self._device,
            dtype=self._dtype,
        )
        mask[..., max(0, context - window) if window else 0 : context] = 0
        mask[..., context:].masked_fill_(seen[:, None], 0)
        return mask

    # Verification

    def _choose(self, tree: Tree) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens, parents and depths (B, N) of the root and the best N - 1 candidates.

        A child is never more probable than its parent and stands behind it, so with a stable order
        among equals the parent of a chosen node is chosen too.
        """
        ranked = tree.scores.sort(dim=-1, descending=True, stable=True).indices
        best = ranked[:, : self.spec.nodes - 1].sort(dim=-1).values
        tokens = torch.cat((self._root, tree.tokens.gather(1, best)), dim=1)
        depths = torch.cat((torch.zeros_like(self._root), tree.depths.gather(1, best)), dim=1)
        above = tree.parents.gather(1, best)
        parents = torch.where(above < 0, 0, torch.searchsorted(best, above.clamp_min(0)) + 1)
        return tokens, torch.cat((torch.zeros_like(self._root), parents), dim=1), depths

    def _ancestors(self, parents: Tensor) -> Tensor:
        """Whether a node (B, N, 1) sees another (B, 1, N): itself and its ancestors."""
        nodes = parents.shape[1]
        seen = torch.eye(nodes, dtype=torch.bool, device=self._device).expand(
            parents.shape[0], nodes, nodes
        )
        for _ in range(self.spec.steps):
            above = seen.gather(1, parents[..., None].expand_as(seen))
            seen = seen | above
        return seen

    def _verify(self, tokens: Tensor, depths: Tensor, seen: Tensor, mark: Mark) -> Tensor:
        context = self.spec.context
        with mark("verify", "embedding"):
            x = F.embedding(tokens, self._embedding)
            if self.family == "gemma3":
                x = x * self.shape.hidden**0.5
        with mark("verify", "attention"):
            cos, sin = rotary(depths + context, self.shape.head_dim, self._dtype)
            mask = self._additive(seen, context)
            windowed = self._additive(seen, context, self.shape.window)
        run = Run(mark, context, cos, sin, mask, windowed)
        for layer in self._layers:
            x = layer(x, run, "verify")
        with mark("verify", "norms"):
            x = rms_norm(x, self._norm)
        with mark("verify", "LM head"):
            return F.linear(x, self._head)

    def _accept(self, tokens: Tensor, parents: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Greedy acceptance: tokens and nodes (B, S + 1) of the path, -1 behind its end."""
        wanted = logits.argmax(dim=-1)
        node = torch.zeros_like(self._root)
        alive = torch.ones_like(self._root, dtype=torch.bool)
        path, nodes = [], []
        for _ in range(self.spec.steps + 1):
            token = wanted.gather(1, node)
            path.append(torch.where(alive, token, -1))
            nodes.append(torch.where(alive, node, -1))
            fits = (parents == node) & (tokens == token)
            fits[:, 0] = False
            child = fits.to(torch.int64).argmax(dim=1, keepdim=True)
            alive = alive & fits.any(dim=1, keepdim=True)
            node = torch.where(alive, child, node)
        return torch.cat(path, dim=1), torch.cat(nodes, dim=1)

    def _compact(self, nodes: Tensor) -> None:
        """Move the accepted nodes' keys and values to the front of the tree's cache entries."""
        context, path = self.spec.context, nodes.shape[1]
        places = nodes.clamp_min(0)[:, None, :, None]
        for layer in self._layers:
            for cache in (layer.keys, layer.values):
                tail = cache[:, :, context : context + self.spec.nodes]
                index = places.expand(-1, cache.shape[1], path, cache.shape[3])
                cache[:, :, context : context + path] = tail.gather(2, index)
