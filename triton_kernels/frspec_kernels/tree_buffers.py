"""Memory for the steps of the draft tree, to be made once and kept for CUDA graphs."""

import torch
from torch import Tensor

from .tree_args import Accepted, Beams, BuiltTree, Candidates, TreeShape
from .tree_launch import argmax_slices


def empty_candidates(shape: TreeShape, batch: int, device: torch.device | str) -> Candidates:
    """Memory for a round's candidates."""
    return Candidates(
        torch.empty(batch, shape.candidates, dtype=torch.float32, device=device),
        torch.empty(batch, shape.candidates, dtype=torch.int64, device=device),
        torch.empty(batch, shape.parents, dtype=torch.int64, device=device),
    )


def empty_beams(
    shape: TreeShape,
    batch: int,
    device: torch.device | str,
    *,
    hidden_size: int = 0,
    dtype: torch.dtype = torch.bfloat16,
) -> Beams:
    """Memory for the beams of a step, with rows of ``hidden_size`` unless that is 0."""
    rows = batch * shape.top_k
    tokens, origin = torch.empty(2, rows, dtype=torch.int64, device=device)
    hidden = torch.empty(rows, hidden_size, dtype=dtype, device=device) if hidden_size else None
    return Beams(tokens, origin, hidden)


def empty_tree(shape: TreeShape, batch: int, device: torch.device | str) -> BuiltTree:
    """Memory for the built trees. Two words of a mask row are one int64 when W is even."""
    n = shape.nodes

    def integers(*size: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    return BuiltTree(
        tokens=integers(batch, n),
        selected=integers(batch, n - 1),
        parents=integers(batch, n, dtype=torch.int32),
        depths=integers(batch * n, dtype=torch.int32),
        positions=integers(batch * n),
        mask=integers(batch * n, shape.words, dtype=torch.int32),
        retrieve_index=integers(batch, n),
        next_token=integers(batch, n),
        next_sibling=integers(batch, n),
    )


def empty_accepted(
    batch: int, nodes: int, max_path: int, device: torch.device | str, *, slots: bool = False
) -> Accepted:
    """Memory for the outcome of a verification, with the slots' moves if wanted."""

    def integers(*size: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    return Accepted(
        accept_index=integers(batch, max_path, dtype=torch.int32),
        accept_lens=integers(batch, dtype=torch.int32),
        predicts=integers(batch * nodes, dtype=torch.int32),
        path_tokens=integers(batch, max_path),
        bonus_tokens=integers(batch),
        new_seq_lens=integers(batch),
        source_slots=integers(batch, max_path) if slots else None,
        target_slots=integers(batch, max_path) if slots else None,
    )


def empty_argmax_keys(rows: int, vocab_size: int, device: torch.device | str) -> Tensor:
    """Memory that :func:`accept_greedy` needs to find the argmax of [rows, vocab_size] logits."""
    parts = argmax_slices(vocab_size).parts
    return torch.empty(rows, parts, dtype=torch.int64, device=device)
