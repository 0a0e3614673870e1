"""The sizes of a draft tree, the tensors that its steps pass on, and the checks of both."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

MAX_TOP_K = 32
MAX_STEPS = 16
MAX_NODES = 1024
MAX_TOKEN_ID = 2**20  # exclusive; ids share an int64 with the scores
INDEX_TYPES = (torch.int64, torch.int32)


@dataclass(frozen=True)
class TreeShape:
    """Sizes of a draft tree: they are fixed when the server starts.

    Attributes:
        top_k: K, the proposals of each beam and the beams that go on.
        steps: S, the depth of the tree.
        nodes: N, nodes of the final tree, its root (the bonus token) included.

    Raises:
        TypeError: sizes that are not ints.
        ValueError: sizes outside of what the kernels take, or more nodes than candidates.
    """

    top_k: int
    steps: int
    nodes: int

    def __post_init__(self) -> None:
        for name, size in vars(self).items():
            if not isinstance(size, int):
                raise TypeError(f"{name} is an int, got {type(size).__name__} {size}")
        if not 1 <= self.top_k <= MAX_TOP_K:
            raise ValueError(f"top_k is in [1, {MAX_TOP_K}], got {self.top_k}")
        if not 1 <= self.steps <= MAX_STEPS:
            raise ValueError(f"steps is in [1, {MAX_STEPS}], got {self.steps}")
        if not 2 <= self.nodes <= min(self.candidates + 1, MAX_NODES):
            raise ValueError(
                f"nodes is in [2, {min(self.candidates + 1, MAX_NODES)}] for top_k={self.top_k} "
                f"and steps={self.steps} ({self.candidates} candidates and the root), "
                f"got {self.nodes}"
            )

    @property
    def candidates(self) -> int:
        """C = K + (S - 1) K²: K children of the root, then K of each beam in each later step."""
        return self.top_k + (self.steps - 1) * self.top_k**2

    @property
    def parents(self) -> int:
        """Width of the parents' list: the root, and the beams of all steps but the last."""
        return 1 + self.top_k * (self.steps - 1)

    @property
    def words(self) -> int:
        """W, 32-bit words of a node's mask."""
        return -(-self.nodes // 32)


class Candidates(NamedTuple):
    """Everything proposed in a round, step after step; SGLang numbers candidates in this order.

    Candidate ``c < K`` is a child of the root. Later ones come in blocks of K: block ``c // K`` has
    the children of candidate ``parents[c // K]``.
    """

    scores: Tensor  # [B, C] float32: product of the probabilities from the root on
    tokens: Tensor  # [B, C] int64
    parents: Tensor  # [B, 1 + K (S - 1)] int64; parents[0] = -1 is the root


class Beams(NamedTuple):
    """What the next draft step runs on."""

    tokens: Tensor  # [B * K] int64
    rows: Tensor  # [B * K] int64: row of the last hidden states that each beam continues
    hidden: Tensor | None = None  # [B * K, H]: those rows


class BuiltTree(NamedTuple):
    """The final tree of each request. Node 0 is the root; a parent comes before its children."""

    tokens: Tensor  # [B, N] int64
    selected: Tensor  # [B, N - 1] int64: candidate of each drafted node, ascending
    parents: Tensor  # [B, N] int32: -1 for the root
    depths: Tensor  # [B * N] int32: 0 for the root
    positions: Tensor  # [B * N] int64: seq_len + depth
    mask: Tensor  # [B * N, W] int32: bit j % 32 of word j // 32 says that the node sees node j
    retrieve_index: Tensor  # [B, N] int64: row of the node in the batch
    next_token: Tensor  # [B, N] int64: first child, or -1
    next_sibling: Tensor  # [B, N] int64: next child of the same parent, or -1


class Accepted(NamedTuple):
    """The outcome of a verification; D = S + 1 tokens at most.

    ``path_tokens`` are the tokens that a round adds to the output: the drafts that the target
    agreed with, then its own next token, the bonus. Slots past ``accept_lens``
    move onto themselves.
    """

    accept_index: Tensor  # [B, D] int32: row of each accepted node in the batch, then -1
    accept_lens: Tensor  # [B] int32: accepted nodes, the root included
    predicts: Tensor  # [B * N] int32: the target's token at accepted nodes, else 0
    path_tokens: Tensor  # [B, D] int64: the target's token after each accepted node, then 0
    bonus_tokens: Tensor  # [B] int64: the last of them
    new_seq_lens: Tensor  # [B] int64: seq_lens + accept_lens
    source_slots: Tensor | None = None  # [B, D] int64: cache slots of the accepted nodes
    target_slots: Tensor | None = None  # [B, D] int64: the request's first slots


def check_tensor(name: str, tensor: Tensor, shape: tuple[int, ...], *dtypes: torch.dtype) -> None:
    """A contiguous tensor of this shape and one of these types.

    Raises:
        TypeError: another dtype.
        ValueError: another shape, or not contiguous.
    """
    if tensor.dtype not in dtypes:
        raise TypeError(f"{name} is {' or '.join(map(str, dtypes))}, got {tensor.dtype}")
    if tuple(tensor.shape) != shape or not tensor.is_contiguous():
        raise ValueError(
            f"{name} is contiguous {list(shape)}, got {list(tensor.shape)} "
            f"with strides {list(tensor.stride())}"
        )


def check_proposals(
    shape: TreeShape, step: int, batch: int, probs: Tensor, token_ids: Tensor
) -> None:
    """The proposals of one growth step.

    Raises:
        TypeError: another dtype, a step that is not an int.
        ValueError: a step that the tree lacks, another shape, rows that are not contiguous.
    """
    if not isinstance(step, int):
        raise TypeError(f"step is an int, got {type(step).__name__}")
    if not 0 <= step < shape.steps:
        raise ValueError(f"step is in [0, {shape.steps}), got {step}")
    if probs.dtype != torch.float32 or token_ids.dtype != torch.int64:
        raise TypeError(
            f"probs are float32 and token_ids int64, got {probs.dtype}, {token_ids.dtype}"
        )
    expected = (batch if step == 0 else batch * shape.top_k, shape.top_k)
    for name, tensor in (("probs", probs), ("token_ids", token_ids)):
        if tuple(tensor.shape) != expected or (tensor.stride(1) != 1 and shape.top_k > 1):
            raise ValueError(
                f"{name} is {list(expected)} with contiguous rows at step {step}, got "
                f"{list(tensor.shape)} with strides {list(tensor.stride())}"
            )


def check_hidden(shape: TreeShape, step: int, batch: int, hidden: Tensor, out: Tensor) -> None:
    """Hidden states and the copies of the beams' rows.

    Raises:
        ValueError: shapes that do not fit, or one memory for both.
    """
    rows = batch if step == 0 else batch * shape.top_k
    if hidden.dim() != 2 or hidden.shape[0] != rows or hidden.stride(1) != 1:
        raise ValueError(f"hidden is [{rows}, H] with contiguous rows, got {list(hidden.shape)}")
    expected = (batch * shape.top_k, hidden.shape[1])
    if out.shape != expected or out.dtype != hidden.dtype or (out.numel() and out.stride(1) != 1):
        raise ValueError(
            f"beams.hidden is {list(expected)} {hidden.dtype} with contiguous rows, got "
            f"{list(out.shape)} {out.dtype} with strides {list(out.stride())}"
        )
    if batch and out.untyped_storage().data_ptr() == hidden.untyped_storage().data_ptr():
        raise ValueError("hidden and beams.hidden share memory: rows are read while others are set")


def check_candidates(shape: TreeShape, candidates: Candidates) -> int:
    """The batch size of well-formed ``candidates``.

    Raises:
        TypeError, ValueError: a tensor that does not fit the shape.
    """
    if candidates.scores.dim() != 2:
        raise ValueError(
            f"candidates.scores is [B, {shape.candidates}], got {list(candidates.scores.shape)}"
        )
    batch = candidates.scores.shape[0]
    check_tensor("candidates.scores", candidates.scores, (batch, shape.candidates), torch.float32)
    check_tensor("candidates.tokens", candidates.tokens, (batch, shape.candidates), torch.int64)
    check_tensor("candidates.parents", candidates.parents, (batch, shape.parents), torch.int64)
    return batch


def check_tree(tree: BuiltTree, shape: TreeShape, batch: int) -> None:
    """The outputs of a build.

    Raises:
        TypeError, ValueError: a tensor that does not fit.
    """
    n, flat = shape.nodes, (batch * shape.nodes,)
    check_tensor("out.selected", tree.selected, (batch, n - 1), torch.int64)
    check_tensor("out.parents", tree.parents, (batch, n), torch.int32)
    check_tensor("out.depths", tree.depths, flat, torch.int32)
    check_tensor("out.positions", tree.positions, flat, torch.int64)
    check_tensor("out.mask", tree.mask, (*flat, shape.words), torch.int32)
    for name in ("tokens", "retrieve_index", "next_token", "next_sibling"):
        check_tensor(f"out.{name}", getattr(tree, name), (batch, n), torch.int64)


def check_path(tokens: Tensor, max_path: int) -> None:
    """The nodes to accept from, and how many of them.

    Raises:
        TypeError: a length that is not an int.
        ValueError: no nodes, or more than the kernel takes.
    """
    if not isinstance(max_path, int):
        raise TypeError(f"max_path is an int, got {type(max_path).__name__}")
    if tokens.dim() != 2 or not 1 <= tokens.shape[1] <= MAX_NODES:
        raise ValueError(f"tokens are [B, N] with N in [1, {MAX_NODES}], got {list(tokens.shape)}")
    if not 1 <= max_path <= MAX_NODES:
        raise ValueError(f"max_path is in [1, {MAX_NODES}], got {max_path}")


def check_accepted(out: Accepted, batch: int, nodes: int, max_path: int, with_slots: bool) -> None:
    """The outputs of an acceptance.

    Raises:
        TypeError, ValueError: a tensor that does not fit, or no memory for the moves.
    """
    paths = (batch, max_path)
    check_tensor("out.accept_index", out.accept_index, paths, torch.int32)
    check_tensor("out.accept_lens", out.accept_lens, (batch,), torch.int32)
    check_tensor("out.predicts", out.predicts, (batch * nodes,), torch.int32)
    check_tensor("out.path_tokens", out.path_tokens, paths, torch.int64)
    check_tensor("out.bonus_tokens", out.bonus_tokens, (batch,), torch.int64)
    check_tensor("out.new_seq_lens", out.new_seq_lens, (batch,), torch.int64)
    if not with_slots:
        return
    if out.source_slots is None or out.target_slots is None:
        raise ValueError("slots are given but out has no source_slots and target_slots")
    check_tensor("out.source_slots", out.source_slots, paths, torch.int64)
    check_tensor("out.target_slots", out.target_slots, paths, torch.int64)
