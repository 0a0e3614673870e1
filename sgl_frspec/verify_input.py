"""From the candidates of a round to what the target verifies: the tree, its mask, its positions."""

from typing import Any

import torch
from sglang.srt.speculative.eagle_info import EagleVerifyInput
from sglang.srt.speculative.eagle_utils import TreeMaskMode, default_tree_mask_mode
from torch import Tensor

from frspec_kernels.sampling_args import DraftLists
from frspec_kernels.tree import BuiltTree, Candidates, TreeShape, build_tree, empty_tree
from frspec_kernels.tree_reference import build_tree_reference


class TreeVerifyInput(EagleVerifyInput):
    """SGLang's input of a verification, with the tree that it describes."""

    tree: BuiltTree
    lists: DraftLists | None = None  # what its drawn nodes came from


class TreeBuilder:
    """Builds the trees of a batch in one launch, in the target's attention backend's own layout."""

    def __init__(self, shape: TreeShape, *, draws: bool = False) -> None:
        """``draws``: tokens are drawn, and must not decide which of them are verified."""
        self.shape = shape
        self.draws = draws

    def build(
        self, candidates: Candidates, root_tokens: Tensor, batch: Any, backend: Any
    ) -> TreeVerifyInput:
        """The trees of a ``ScheduleBatch`` for the target, whose attention backend is given."""
        found = self.allocate(batch.seq_lens, batch.seq_lens_sum, backend)
        self.fill(found, candidates, root_tokens, batch.seq_lens, backend)
        return found

    def allocate(self, seq_lens: Tensor, context: int | None, backend: Any) -> TreeVerifyInput:
        """Memory for the trees of requests whose lengths sum to ``context``, if that is known."""
        requests = seq_lens.shape[0]
        tree = empty_tree(self.shape, requests, seq_lens.device)
        if not takes_mask_words(backend):
            return self.describe(tree, _byte_mask(backend, seq_lens, context, self.shape.nodes))
        # Where the backend's CUDA graphs read it, if it has any for as many requests.
        words, rows = backend.mask_words, requests * self.shape.nodes
        if words is not None and words.shape[0] >= rows:
            tree = tree._replace(mask=words[:rows])
        return self.describe(tree, tree.mask)

    def fill(
        self,
        found: TreeVerifyInput,
        candidates: Candidates,
        root_tokens: Tensor,
        seq_lens: Tensor,
        backend: Any,
    ) -> None:
        """Build the trees and their mask into ``found``."""
        if seq_lens.device.type == "cpu":
            tree = build_tree_reference(
                candidates, self.shape, root_tokens, seq_lens, ties_by_place=self.draws
            )
            for target, value in zip(found.tree, tree, strict=True):
                target.copy_(value)
            if not takes_mask_words(backend):
                cells = unpack_mask(tree.mask, self.shape.nodes).flatten()
                found.custom_mask[: cells.shape[0]] = cells
            return
        masks: dict[str, Tensor] = {}
        if not takes_mask_words(backend):
            whole = _mask_layout(backend) == TreeMaskMode.FULL_MASK
            if whole and backend.verify_mask is not None and backend.verify_mask.is_read:
                found.custom_mask.fill_(1)
            masks = {"full_mask" if whole else "draft_mask": found.custom_mask}
        build_tree(
            candidates, self.shape, root_tokens, seq_lens,
            out=found.tree, ties_by_place=self.draws, **masks,
        )  # fmt: skip

    def describe(self, tree: BuiltTree, mask: Tensor) -> TreeVerifyInput:
        """SGLang's record of ``tree``, with ``mask`` as the attention backend wants it."""
        # SGLang's types leave out that it fills in some of these later.
        unset: Any = None
        found = TreeVerifyInput(
            draft_token=tree.tokens.flatten(),
            custom_mask=mask,
            positions=tree.positions,
            retrieve_index=tree.retrieve_index,
            retrieve_next_token=tree.next_token,
            retrieve_next_sibling=tree.next_sibling,
            retrieve_cum_len=unset,
            spec_steps=self.shape.steps,
            topk=self.shape.top_k,
            draft_token_num=self.shape.nodes,
            capture_hidden_mode=unset,
            seq_lens_sum=unset,
            seq_lens_cpu=unset,
        )
        found.tree = tree
        return found


def takes_mask_words(backend: Any) -> bool:
    """Whether an attention backend reads the packed mask: FRSPEC's does."""
    return hasattr(backend, "mask_words")


def _mask_layout(backend: Any) -> TreeMaskMode:
    owned = backend.verify_mask
    return default_tree_mask_mode() if owned is None else owned.mode


def _byte_mask(backend: Any, seq_lens: Tensor, context: int | None, nodes: int) -> Tensor:
    """Memory of the mask that one of SGLang's backends reads; cells of the context are True."""
    owned, requests = backend.verify_mask, seq_lens.shape[0]
    if owned is not None and owned.fits(requests):
        return owned.buffer
    known = requests * backend.max_context_len if context is None else context
    if _mask_layout(backend) != TreeMaskMode.FULL_MASK:
        known = 0
    cells = nodes * (known + requests * nodes)
    return torch.ones(cells, dtype=torch.bool, device=seq_lens.device)


def unpack_mask(words: Tensor, nodes: int) -> Tensor:
    """``[rows, W]`` int32 to ``[rows, nodes]`` bool: bit ``j % 32`` of word ``j // 32``."""
    bits = (words[..., None] >> torch.arange(32, device=words.device)) & 1
    return bits.flatten(-2)[..., :nodes].bool()
