"""What the acceptance of a sampled tree takes, its memory, and the checks of both."""

from typing import NamedTuple

import torch
from torch import Tensor

from . import sampling_launch
from .sampling_launch import GROUPS, Sizes
from .tree_args import INDEX_TYPES, check_tensor

VOCAB_LIMIT = 1 << 23  # so many weights of 2^40 units each, the largest, pass int64
MAX_LIST = 1024
_PARAMETER_TYPES = {
    "temperatures": torch.float32,
    "top_ks": torch.int32,
    "top_ps": torch.float32,
    "min_ps": torch.float32,
    "seeds": torch.int64,
}


class Sampling(NamedTuple):
    """How each request samples. ``top_k`` keeps all below 1 or from V on; 1 is greedy."""

    temperatures: Tensor  # [B] float32; 0 is greedy
    top_ks: Tensor  # [B] int32
    top_ps: Tensor  # [B] float32
    min_ps: Tensor  # [B] float32
    seeds: Tensor  # [B] int64
    truncates: bool = True  # False: no request that is not greedy has a top-k, top-p or min-p


class DraftLists(NamedTuple):
    """What drawn children were drawn from: candidates of a draft step, best first.

    The children of node n were proposed from list ``rows[b, n]``: the first ``fixed`` candidates
    are never drawn, the others by their share of what is left, without replacement; when that is
    0, the next one in the list's order.
    """

    drawn: Tensor  # [B, N] int8: 1 for a drawn node, 0 for a fixed one
    rows: Tensor  # [B, N] int32 in [0, R), -1 for a node without drawn children
    ids: Tensor  # [B, R, C] int64, distinct in a list; -1 where a list is shorter
    q: Tensor  # [B, R, C] float32; their sum need not be 1
    fixed: int


class SamplingWorkspace(NamedTuple):
    """Memory between the launches."""

    best_keys: Tensor  # [slots, P] int64
    sums: Tensor  # [slots, P] float32
    group_orders: Tensor  # [slots, P * GROUPS] int32
    brackets: Tensor  # [LEVELS + 1, slots, 2] int32
    edges: Tensor  # [LEVELS, slots, EDGES] int32
    edge_masses: Tensor  # [LEVELS, slots, P, EDGES] float32
    masses_above: Tensor  # [slots, P] int64
    counts: Tensor  # [slots] int32
    candidates: Tensor  # [slots, V + FEW] int64
    next: Tensor  # [B, N] int32
    current: Tensor  # [B] int32
    pivots: Tensor  # [slots] int64
    slopes: Tensor  # [slots] float32
    left_ids: Tensor  # [slots, LEFT] int64
    left_weights: Tensor  # [slots, LEFT] float32
    race_keys: Tensor  # [B, P] int64


def workspace_for(
    sizes: Sizes, batch: int, truncates: bool, device: torch.device | str
) -> SamplingWorkspace:
    """New memory; the lists of candidates are left out where nothing truncates."""

    def empty(*size: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    i64, i32, f32 = torch.int64, torch.int32, torch.float32
    slots, cut = sizes.slots, sizes.slots if truncates else 0
    levels, edges = sampling_launch.LEVELS, sampling_launch.EDGES
    return SamplingWorkspace(
        best_keys=empty(slots, sizes.parts, dtype=i64),
        sums=empty(slots, sizes.parts, dtype=f32),
        group_orders=empty(cut, sizes.parts * GROUPS, dtype=i32),
        brackets=empty(levels + 1, cut, 2, dtype=i32),
        edges=empty(levels, cut, edges, dtype=i32),
        edge_masses=empty(levels, cut, sizes.parts, edges, dtype=f32),
        masses_above=empty(cut, sizes.parts, dtype=i64),
        counts=empty(slots, dtype=i32),
        candidates=empty(cut, sizes.vocab + sampling_launch.FEW, dtype=i64),
        next=empty(batch, sizes.nodes, dtype=i32),
        current=empty(batch, dtype=i32),
        pivots=empty(slots, dtype=i64),
        slopes=empty(slots, dtype=f32),
        left_ids=empty(slots, sizes.left, dtype=i64),
        left_weights=empty(slots, sizes.left, dtype=f32),
        race_keys=empty(batch, sizes.parts, dtype=i64),
    )


def check_workspace(
    workspace: SamplingWorkspace, sizes: Sizes, batch: int, truncates: bool
) -> None:
    """Memory made for the same sizes.

    Raises:
        TypeError, ValueError: a tensor that does not fit.
    """
    expected = workspace_for(sizes, batch, truncates, "meta")
    for name, tensor, like in zip(expected._fields, workspace, expected, strict=True):
        check_tensor(f"workspace.{name}", tensor, tuple(like.shape), like.dtype)


def check_rows(
    logits: Tensor, tokens: Tensor, parents: Tensor, seq_lens: Tensor, sampling: Sampling
) -> None:
    """Logits, the tree and the requests' parameters.

    Raises:
        TypeError: another dtype.
        ValueError: another shape, or rows of logits that are not contiguous.
    """
    if tokens.dim() != 2:
        raise ValueError(f"tokens are [B, N], got {list(tokens.shape)}")
    batch, nodes = tokens.shape
    check_tensor("tokens", tokens, (batch, nodes), torch.int64)
    check_tensor("parents", parents, (batch, nodes), torch.int32)
    check_tensor("seq_lens", seq_lens, (batch,), *INDEX_TYPES)
    for name, dtype in _PARAMETER_TYPES.items():
        check_tensor(f"sampling.{name}", getattr(sampling, name), (batch,), dtype)
    if logits.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise TypeError(f"logits are float32, bfloat16 or float16, got {logits.dtype}")
    rows = batch * nodes
    if logits.dim() != 2 or logits.shape[0] != rows or logits.stride(1) != 1:
        raise ValueError(
            f"logits are [{rows}, V] with contiguous rows, got {list(logits.shape)} "
            f"with strides {list(logits.stride())}"
        )
    if not 1 <= logits.shape[1] < VOCAB_LIMIT:
        raise ValueError(f"logits have between 1 and 2^23 - 1 columns, got {logits.shape[1]}")


def check_lists(lists: DraftLists, batch: int, nodes: int) -> None:
    """The draft's lists.

    Raises:
        TypeError, ValueError: tensors that do not fit, or more fixed candidates than a list has.
    """
    if lists.ids.dim() != 3:
        raise ValueError(f"lists.ids are [B, R, C], got {list(lists.ids.shape)}")
    _, rows, width = lists.ids.shape
    if not 1 <= width <= MAX_LIST:
        raise ValueError(
            f"a list has 1 to {MAX_LIST} candidates, got {width}; cut it: any q is exact"
        )
    if not 0 <= lists.fixed < width:
        raise ValueError(f"lists.fixed is in [0, {width}), got {lists.fixed}")
    check_tensor("lists.drawn", lists.drawn, (batch, nodes), torch.int8)
    check_tensor("lists.rows", lists.rows, (batch, nodes), torch.int32)
    check_tensor("lists.ids", lists.ids, (batch, rows, width), torch.int64)
    check_tensor("lists.q", lists.q, (batch, rows, width), torch.float32)


def check_thresholds(single: float, accumulated: float, lists: DraftLists | None) -> None:
    """The acceptance thresholds.

    Raises:
        ValueError: outside of (0, 1] and [0, 1], or not 1 beside drawn children.
    """
    if not (0 <= single <= 1 and 0 < accumulated <= 1):
        raise ValueError(
            "threshold_single is in [0, 1] and threshold_acc in (0, 1], "
            f"got {single}, {accumulated}"
        )
    if lists is not None and (single, accumulated) != (1.0, 1.0):
        raise ValueError("drawn children are accepted by p / q: leave both thresholds at 1")
