"""The draft of the eager loop: one decoder layer, run step by step, grows a tree.

B requests, K branches a step, S steps, R rows of a pass, V ids of the draft.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.breakdown.eager_model import Layer, Run, rotary
from bench.breakdown.eager_tree import Tree, additive_mask
from bench.breakdown.ranges import Mark
from sgl_frspec.explain import Speculation


@dataclass(frozen=True)
class DraftHead:
    """The draft's LM head: weights (V, H) and the token ids, int64 (V,), of its rows."""

    weight: Tensor
    ids: Tensor

    @property
    def vocab(self) -> int:
        """Rows, V."""
        return len(self.weight)


@dataclass
class Draft:
    """Weights of the draft.

    Attributes:
        spec: steps, branches, context.
        embedding: (target's V, H), the target's.
        fc: (H, 2 H).
        layer: the one decoder layer.
        head: what it proposes with.
        hidden: (B, S + 1, H), what the last verification left of the accepted tokens.
        root: int64 (B, 1), the last accepted token.
    """

    spec: Speculation
    embedding: Tensor
    fc: Tensor
    layer: Layer
    head: DraftHead
    hidden: Tensor
    root: Tensor

    def grow(self, mark: Mark) -> Tree:
        """All candidates: K of the root, then K of each of the K best of the step before."""
        spec, batch, k, device = self.spec, self.spec.batch, self.spec.top_k, self.root.device
        last = self._extend(mark)
        log_probs, ids = self._propose(last, mark)
        with mark("draft", "tree"):
            scores, tokens = log_probs[:, 0], ids[:, 0]
            grown = [Tree(tokens, scores, torch.full_like(tokens, -1), torch.ones_like(tokens))]
            hidden = last.expand(batch, k, -1)
            frontier = torch.arange(k, device=device).expand(batch, k)
            seen = torch.eye(k, dtype=torch.bool, device=device).expand(batch, k, k)
            first = k
        behind = spec.context + spec.steps + 1  # entries in front of the tree's
        for step in range(1, spec.steps):
            with mark("draft", "tree"):
                positions = torch.full_like(tokens, behind + step - 1)
                mask = additive_mask(seen, behind, self.fc.dtype)
            written = behind + (step - 1) * k
            hidden = self._pass(tokens, hidden, positions, written, mask, mark)
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
                own = torch.eye(k, dtype=torch.bool, device=device).expand(batch, k, k)
                past = seen.gather(1, above[..., None].expand(batch, k, seen.shape[2]))
                seen = torch.cat((past, own), dim=2)
        with mark("draft", "tree"):
            columns = zip(*((t.tokens, t.scores, t.parents, t.depths) for t in grown), strict=True)
            return Tree(*(torch.cat(column, dim=1) for column in columns))

    def _extend(self, mark: Mark) -> Tensor:
        """Run the tokens accepted last; hidden state (B, 1, H) of the newest."""
        batch, rows, context = self.spec.batch, self.spec.steps + 1, self.spec.context
        device = self.root.device
        with mark("draft", "tree"):
            tokens = self.root.expand(batch, rows)
            places = torch.arange(context, context + rows, device=device)
            chain = torch.ones(rows, rows, dtype=torch.bool, device=device).tril()
            mask = additive_mask(chain.expand(batch, rows, rows), context, self.fc.dtype)
        positions = places.expand(batch, rows)
        return self._pass(tokens, self.hidden, positions, context, mask, mark)[:, -1:]

    def _pass(
        self,
        tokens: Tensor,
        hidden: Tensor,
        positions: Tensor,
        written: int,
        mask: Tensor,
        mark: Mark,
    ) -> Tensor:
        with mark("draft", "embedding"):
            embedded = F.embedding(tokens, self.embedding)
        with mark("draft", "fc"):
            x = F.linear(torch.cat((embedded, hidden), dim=-1), self.fc)
        with mark("draft", "attention"):
            cos, sin = rotary(positions, self.layer.shape.head_dim, self.fc.dtype)
        return self.layer(x, Run(mark, written, cos, sin, mask, mask), "draft")

    def _propose(self, hidden: Tensor, mark: Mark) -> tuple[Tensor, Tensor]:
        """Log-probabilities and token ids (B, R, K) of the best successors of each row."""
        with mark("draft", "LM head"):
            logits = F.linear(hidden, self.head.weight)
        with mark("draft", "softmax"):
            log_probs = F.log_softmax(logits.float(), dim=-1)
        with mark("draft", "top-k"):
            best, rows = log_probs.topk(self.spec.top_k, dim=-1)
            return best, self.head.ids[rows]
