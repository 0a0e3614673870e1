"""A round whose drafted tokens are drawn: ``--speculative-use-rejection-sampling``.

The last child of every node is drawn from the draft's list of candidates instead of being the next
best one, and accepted by min(1, p / q) (``docs/sampling.md``). The head gives lists where it gave
children; :class:`DrawnProposals` draws from them, step by step, and keeps the lists until the
verification asks for them. All of it lies in memory that stays where it is, for SGLang captures the
steps as a CUDA graph.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from frspec_kernels.reduced_topk import TopK
from frspec_kernels.reduced_topk_args import MAX_K
from frspec_kernels.sampling_args import DraftLists
from frspec_kernels.sampling_proposal import Children, draw_children, lists_of_tree
from frspec_kernels.sampling_proposal_reference import draw_children_on_cpu
from frspec_kernels.tree import BuiltTree, TreeShape

# Candidates of a list. At temperature 1, 32 of them cost 1.3 points of a chain's acceptance against
# 256, and the head 54 rounds less than 64 would (docs/measurements.md).
LIST_SIZE = 32


def list_size(top_k: int, hot_ids: int) -> int:
    """C: enough to draw from behind the fixed children, and no more than the head gives."""
    return min(max(LIST_SIZE, 2 * top_k), MAX_K, hot_ids)


class _Level(NamedTuple):
    """The lists of one depth, and what was made of them: rows of all requests."""

    best: TopK
    children: Children


class DrawnProposals:
    """Lists, draws and random numbers of a round, for up to as many requests as are reserved."""

    def __init__(self, shape: TreeShape, width: int, device: torch.device) -> None:
        """``width`` is C."""
        self.shape = shape
        self.width = width
        self.device = device
        self.fixed = shape.top_k - 1
        self._stays = False
        self._allocate(1)

    def reserve(self, requests: int) -> None:
        """Memory for so many requests that CUDA graphs can be captured with."""
        self._allocate(requests)
        self._stays = True

    def _allocate(self, requests: int) -> None:
        def zeros(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(size, dtype=dtype, device=self.device)

        self.capacity = requests
        self._temperatures = zeros(requests)
        self._seeds = zeros(requests, dtype=torch.int64)
        self._seq_lens = zeros(requests, dtype=torch.int64)
        self._levels: list[_Level] = []
        for depth in range(self.shape.steps):
            rows = requests * (self.shape.top_k if depth else 1)
            ids = zeros(rows, self.width, dtype=torch.int64)
            best = TopK(zeros(rows, self.width), ids, zeros(rows))
            tokens = zeros(rows, self.shape.top_k, dtype=torch.int64)
            children = Children(tokens, zeros(rows, self.shape.top_k), zeros(rows, self.width))
            self._levels.append(_Level(best, children))

    def begin(
        self, info: Any, seq_lens: Tensor, probs: Tensor, token_ids: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Take a round's requests and draw the root's children: their scores and tokens [B, K].

        Args:
            info: a ``SamplingBatchInfo`` with seeds.
            seq_lens: ``[B]`` tokens before the root.
            probs, token_ids: ``[B, C]`` the head's lists.
        """
        requests = len(seq_lens)
        if requests > self.capacity:
            if self._stays:
                raise RuntimeError(f"{requests} requests in a round, memory for {self.capacity}")
            self._allocate(requests)
        # SGLang's greedy requests have a top-k of 1.
        own = torch.where(info.top_ks == 1, 0.0, info.temperatures.flatten())
        self._temperatures[:requests] = own
        self._seeds[:requests] = info.sampling_seed
        self._seq_lens[:requests] = seq_lens
        best = self._levels[0].best
        best.probs[:requests] = probs
        best.token_ids[:requests] = token_ids
        return self.draw(0, requests)

    def list_of(self, depth: int) -> TopK:
        """Where the head writes the lists of the nodes at ``depth``."""
        return self._levels[depth].best

    def draw(self, depth: int, requests: int) -> tuple[Tensor, Tensor]:
        """Scores and tokens ``[rows, K]`` of the children of the nodes at ``depth``."""
        level = self._levels[depth]
        rows = requests * (self.shape.top_k if depth else 1)
        probs, ids = level.best.probs[:rows], level.best.token_ids[:rows]
        out = Children(*(tensor[:rows] for tensor in level.children))
        of_requests = (
            self._temperatures[:requests], self._seeds[:requests], self._seq_lens[:requests],
        )  # fmt: skip
        sizes = {"children": self.shape.top_k, "fixed": self.fixed}
        if self.device.type == "cpu":
            for target, drawn in zip(
                out, draw_children_on_cpu(probs, ids, *of_requests, depth, **sizes), strict=True
            ):
                target.copy_(drawn)
        else:
            draw_children(probs, ids, *of_requests, depth, **sizes, out=out)
        return out.scores, out.token_ids

    def lists(self, tree: BuiltTree) -> DraftLists:
        """What the drawn nodes of this round's ``tree`` came from."""
        requests = tree.tokens.shape[0]

        def together(which: list[Tensor]) -> Tensor:
            rows = [1, *[self.shape.top_k] * (self.shape.steps - 1)]
            parts = [
                tensor[: requests * count].view(requests, count, self.width)
                for tensor, count in zip(which, rows, strict=True)
            ]
            return torch.cat(parts, 1)

        ids = together([level.best.token_ids for level in self._levels])
        q = together([level.children.q for level in self._levels])
        return lists_of_tree(
            tree.selected, tree.parents, ids, q, children=self.shape.top_k, fixed=self.fixed
        )
