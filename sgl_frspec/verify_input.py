"""From the candidates of a round to what the target verifies: the tree, its mask, its positions."""

from typing import Any

import torch
from sglang.srt.speculative.eagle_info import EagleVerifyInput
from sglang.srt.speculative.eagle_utils import TreeMaskMode, default_tree_mask_mode
from torch import Tensor

from frspec_kernels.tree import BuiltTree, Candidates, TreeShape, build_tree, empty_tree
from frspec_kernels.tree_reference import build_tree_reference


class TreeVerifyInput(EagleVerifyInput):
    """SGLang's input of a verification, with the tree that it describes."""

    tree: BuiltTree


class TreeBuilder:
    """Builds the trees of a batch in one launch, in the target's attention backend's own layout."""

    def __init__(self, shape: TreeShape) -> None:
        self.shape = shape

    def build(
        self, candidates: Candidates, root_tokens: Tensor, batch: Any, target_worker: Any
    ) -> TreeVerifyInput:
        """The trees of ``batch``, a ``ScheduleBatch`` before the round, to be verified."""
        backend = target_worker.model_runner.attn_backend
        requests, device = batch.seq_lens.shape[0], batch.seq_lens.device
        if device.type == "cpu":
            tree = build_tree_reference(candidates, self.shape, root_tokens, batch.seq_lens)
            mask = unpack_mask(tree.mask, self.shape.nodes).flatten()
            return self.describe(tree, mask)
        tree, masks = self.memory(backend, requests, device), {}
        if not takes_mask_words(backend):
            kind, mask = _byte_mask(backend, batch, self.shape.nodes)
            masks = {"full_mask" if kind == TreeMaskMode.FULL_MASK else "draft_mask": mask}
        build_tree(candidates, self.shape, root_tokens, batch.seq_lens, out=tree, **masks)
        return self.describe(tree, next(iter(masks.values()), tree.mask))

    def memory(self, backend: Any, requests: int, device: torch.device) -> BuiltTree:
        """Where trees go; their masks where the backend's CUDA graphs read them, if it has any."""
        tree = empty_tree(self.shape, requests, device)
        words = getattr(backend, "mask_words", None)
        rows = requests * self.shape.nodes
        if words is None or words.shape[0] < rows:
            return tree
        return tree._replace(mask=words[:rows])

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


def _byte_mask(backend: Any, batch: Any, nodes: int) -> tuple[TreeMaskMode, Tensor]:
    """The layout and the memory of the mask that one of SGLang's backends reads.

    Cells of the context are True already; the tree's own are left to the builder.
    """
    requests, device = batch.seq_lens.shape[0], batch.seq_lens.device
    owned = backend.verify_mask
    kind = default_tree_mask_mode() if owned is None else owned.mode
    if owned is not None and owned.fits(requests):
        if kind == TreeMaskMode.FULL_MASK and owned.is_read:
            owned.buffer.fill_(1)
        return kind, owned.buffer
    context = batch.seq_lens_sum
    if kind != TreeMaskMode.FULL_MASK:
        context = 0
    elif context is None:
        context = requests * backend.max_context_len
    cells = nodes * (context + requests * nodes)
    return kind, torch.ones(cells, dtype=torch.bool, device=device)


def unpack_mask(words: Tensor, nodes: int) -> Tensor:
    """``[rows, W]`` int32 to ``[rows, nodes]`` bool: bit ``j % 32`` of word ``j // 32``."""
    bits = (words[..., None] >> torch.arange(32, device=words.device)) & 1
    return bits.flatten(-2)[..., :nodes].bool()
