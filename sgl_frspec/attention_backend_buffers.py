"""Device memory that the attention backends of one server share.

A round drafts, verifies and extends the draft, for the same requests with the same contexts. The
first of these phases that runs on our backends copies the contexts' slots, the others read the
copy. CUDA graphs captured by all phases keep its address.
"""

from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from frspec_kernels.context_snapshot import snapshot_contexts
from frspec_kernels.draft_attention import pack_mask
from frspec_kernels.tree_attention import tree_attention_workspace
from frspec_kernels.tree_attention_inputs import (
    AttentionShape,
    DraftTree,
    TreeAttentionWorkspace,
)


@dataclass(frozen=True)
class Contexts:
    """Where the contexts of ``B`` requests lie in the cache."""

    starts: Tensor  # [B] int, or [B + 1] without lengths: into the elements of slots
    slots: Tensor  # int
    lengths: Tensor | None  # [B] int32

    def first(self, batch: int) -> "Contexts":
        """Those of the first requests, in the same memory."""
        lengths = self.lengths
        return Contexts(
            self.starts[:batch], self.slots[:batch], None if lengths is None else lengths[:batch]
        )


class SharedBuffers:
    """The round's contexts, scratch memory, and trees that are chains."""

    def __init__(self, req_to_token: Tensor) -> None:
        self.req_to_token = req_to_token
        # Which phases copy the contexts each round; those after them need not. A backend may exist
        # without verifying (another one does), so verification says so when it first copies.
        self.draft_decode_copies = False
        self.verify_copies = False
        self.max_batch = 0
        self._reserved: Contexts | None = None
        self._workspaces: dict[tuple[AttentionShape, int], TreeAttentionWorkspace] = {}
        self._chains: dict[tuple[int, int], DraftTree] = {}

    def reserve(self, max_batch: int) -> None:
        """Memory for batches in CUDA graphs; the first call, before any capture, sets the size.

        Raises:
            ValueError: a later call for more.
        """
        if self._reserved is None:
            self.max_batch = max_batch
            self._reserved = self._allocate(max_batch)
        elif max_batch > self.max_batch:
            raise ValueError(
                f"CUDA graphs of {max_batch} requests after graphs of at most {self.max_batch}:"
                " give target and draft the same --cuda-graph-bs"
            )

    def _allocate(self, batch: int) -> Contexts:
        width, device = self.req_to_token.shape[1], self.req_to_token.device
        # Zeros: a graph that is captured before any round reads slot 0, which always exists.
        return Contexts(
            torch.arange(batch, device=device) * width,
            torch.zeros(batch, width, dtype=torch.int32, device=device),
            torch.zeros(batch, dtype=torch.int32, device=device),
        )

    def contexts(self, batch: int) -> Contexts:
        """Those in the reserved memory.

        Raises:
            ValueError: for more requests than were reserved.
        """
        if self._reserved is None or batch > self.max_batch:
            raise ValueError(f"memory for {self.max_batch} requests is reserved, not for {batch}")
        return self._reserved.first(batch)

    def copy(self, rows: Tensor, seq_lens: Tensor, *, tail: int = 0) -> Contexts:
        """Copy the requests' contexts, to the reserved memory if they fit: one launch.

        Args:
            rows: ``[B]`` the requests' rows of ``req_to_token``.
            seq_lens: ``[B]``.
            tail: tokens at the end of ``seq_lens`` that are not context.
        """
        batch = rows.shape[0]
        fits = self._reserved is not None and batch <= self.max_batch
        contexts = self.contexts(batch) if fits else self._allocate(batch)
        assert contexts.lengths is not None
        snapshot_contexts(
            self.req_to_token, rows, seq_lens, contexts.slots, contexts.lengths, tail=tail
        )
        return contexts

    def workspace(
        self, shape: AttentionShape, batch: int, nodes: int
    ) -> TreeAttentionWorkspace | None:
        """Scratch memory for one launch; None for batches beyond those of CUDA graphs."""
        if batch > self.max_batch:
            return None
        key = shape, nodes
        if key not in self._workspaces:
            self._workspaces[key] = tree_attention_workspace(
                shape, batch=self.max_batch, max_nodes=nodes, device=self.req_to_token.device
            )
        return self._workspaces[key]

    def chains(self, batch: int, length: int) -> DraftTree:
        """``batch`` trees of ``length`` nodes, each the child of the one before it."""
        key = batch, length
        if key not in self._chains:
            device = self.req_to_token.device
            ancestors = torch.ones(length, length, dtype=torch.bool, device=device).tril()
            starts = torch.arange(batch + 1, dtype=torch.int32, device=device) * length
            depths = torch.arange(length, dtype=torch.int32, device=device).repeat(batch)
            self._chains[key] = DraftTree(
                starts, length, pack_mask(ancestors).repeat(batch, 1), depths=depths
            )
        return self._chains[key]


_SHARED: "WeakKeyDictionary[object, SharedBuffers]" = WeakKeyDictionary()


def shared_buffers(req_to_token_pool: object, req_to_token: Tensor) -> SharedBuffers:
    """The buffers of the server that owns this pool: target and draft have one pool."""
    if req_to_token_pool not in _SHARED:
        _SHARED[req_to_token_pool] = SharedBuffers(req_to_token)
    return _SHARED[req_to_token_pool]
