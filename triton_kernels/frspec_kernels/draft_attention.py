"""Draft decoding as tree attention: the branches of a request share one read of its context.

At draft step ``s`` (from 0) each of the ``N`` branches of a request has one query and has written
its keys of steps ``0 .. s`` into cache slots of its own, ``S`` slots a branch for the whole round.
Branch ``j`` sees the context and its own keys: bits ``j * S .. j * S + s``. Masks for all steps are
made once; slots that later steps will fill are listed but not seen, so nothing is copied between
steps.
"""

from dataclasses import dataclass

import torch

from frspec_kernels.tree_attention_inputs import DraftTree


@dataclass(frozen=True)
class DraftBranches:
    """The part of draft decoding that no round changes; see :func:`draft_branches`."""

    branches: int
    qo_indptr: torch.Tensor  # [B + 1] int32
    key_indptr: torch.Tensor  # [B + 1] int32
    masks: torch.Tensor  # [S, B * N, W] int32
    depths: torch.Tensor  # [S, B * N] int32
    key_depths: torch.Tensor  # [B * N * S] int32

    def tree(self, slots: torch.Tensor, step: int, mask: torch.Tensor | None = None) -> DraftTree:
        """What :func:`tree_attention` takes at ``step``.

        Args:
            slots: ``[B * N * S]`` cache slots, branch by branch.
            step: from 0.
            mask: ``[B * N, W]`` instead of every branch's own slots, for branches whose ancestors
                lie in other branches' slots; bit j is the j-th slot of the request.

        Raises:
            TypeError: a step that is not an int.
            ValueError: a step, slots or mask outside the sizes that this was made for.
        """
        steps = self.masks.shape[0]
        if not isinstance(step, int):
            raise TypeError(f"step is an int, got {type(step).__name__}")
        if not 0 <= step < steps:
            raise ValueError(f"step is in [0, {steps}), got {step}")
        if mask is not None:
            self._check_mask(mask, self.branches * steps)
        if slots.numel() != self.key_depths.numel():
            raise ValueError(
                f"slots has {slots.numel()} entries, but branches x steps of all requests are "
                f"{self.key_depths.numel()}"
            )
        return DraftTree(
            self.qo_indptr,
            self.branches,
            self.masks[step] if mask is None else mask,
            slots=slots,
            key_indptr=self.key_indptr,
            depths=self.depths[step],
            key_depths=self.key_depths,
        )

    def _check_mask(self, mask: torch.Tensor, keys: int) -> None:
        rows = self.masks.shape[1]
        bits = 8 * mask.element_size() * mask.shape[-1] if mask.dim() == 2 else 0
        if bits < keys or mask.shape[0] != rows:
            raise ValueError(
                f"mask has a row for each of {rows} branches and a bit for each of a request's "
                f"{keys} slots, {-(-keys // 32)} int32 words; got {list(mask.shape)} {mask.dtype}"
            )


def draft_branches(
    batch: int, branches: int, num_steps: int, device: torch.device | str
) -> DraftBranches:
    """Index lists, masks and depths for ``batch`` requests of ``branches`` branches.

    Raises:
        TypeError: sizes that are not ints.
        ValueError: sizes below 1.
    """
    sizes = (batch, branches, num_steps)
    if not all(isinstance(size, int) for size in sizes):
        raise TypeError(f"batch, branches and num_steps are ints, got {sizes}")
    if min(sizes) < 1:
        raise ValueError(
            f"batch, branches and num_steps are at least 1, got {batch}, {branches}, {num_steps}"
        )
    starts = torch.arange(batch + 1, dtype=torch.int32, device=device)
    steps = torch.arange(num_steps, dtype=torch.int32, device=device)
    return DraftBranches(
        branches,
        starts * branches,
        starts * (branches * num_steps),
        _branch_masks(branches, num_steps).repeat(1, batch, 1).to(device),
        steps[:, None].repeat(1, batch * branches),
        steps.repeat(batch * branches),
    )


def _branch_masks(branches: int, num_steps: int) -> torch.Tensor:
    """``[S, N, W]`` int32 words: branch ``j`` at step ``s`` sees keys ``j * S .. j * S + s``."""
    words = (branches * num_steps + 31) // 32
    key = torch.arange(words * 32)
    first = torch.arange(branches)[None, :, None] * num_steps
    last = first + torch.arange(num_steps)[:, None, None]
    return pack_mask((key >= first) & (key <= last))


def pack_mask(visible: torch.Tensor) -> torch.Tensor:
    """``[..., W]`` int32 words of ``[..., keys]`` booleans: key j is bit j % 32 of word j // 32."""
    keys = visible.shape[-1]
    padded = torch.nn.functional.pad(visible, (0, -keys % 32))
    bits = torch.arange(32, device=visible.device)
    words = (padded.unflatten(-1, (-1, 32)).long() << bits).sum(-1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)
