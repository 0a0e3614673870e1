"""Fixed memory of a captured round: what it reads, and the batches of its three phases."""

from typing import Any

import torch
from sglang.srt.model_executor.forward_batch_info import (
    CaptureHiddenMode,
    ForwardBatch,
    ForwardMode,
)
from sglang.srt.speculative.eagle_info import EagleDraftExtendInput, EagleDraftInput
from torch import Tensor

from frspec_kernels.tree import TreeShape


class RoundInputs:
    """What a round needs to know of its requests: rows of the first ``batch`` are read."""

    def __init__(
        self, batch: int, relayed: int, hidden_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.rows = zeros(batch)  # of the table of slots
        self.seq_lens = zeros(batch)  # before the round
        self.bonus_tokens = zeros(batch)
        self.token_ids = zeros(batch, relayed)
        self.probs = zeros(batch, relayed, dtype=torch.float32)
        self.hidden = zeros(batch, hidden_size, dtype=dtype)

    def fill(self, batch: Any, draft_input: Any, padded: int, seq_len_of_padding: int) -> None:
        """Take a ``ScheduleBatch``; requests up to ``padded`` own no slots but the reserved one."""
        requests = batch.seq_lens.shape[0]
        if padded > requests:
            self.seq_lens[requests:padded].fill_(seq_len_of_padding)
            self.rows[requests:padded].zero_()
        pairs = [
            (self.rows, batch.req_pool_indices),
            (self.seq_lens, batch.seq_lens),
            (self.bonus_tokens, draft_input.bonus_tokens),
            (self.token_ids, draft_input.topk_index),
            (self.probs, draft_input.topk_p),
            (self.hidden, draft_input.hidden_states),
        ]
        by_type: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
        for own, given in pairs:
            targets, sources = by_type.setdefault(given.dtype, ([], []))
            targets.append(own[:requests])
            sources.append(given)
        for targets, sources in by_type.values():
            torch._foreach_copy_(targets, sources)  # pyright: ignore[reportPrivateImportUsage]


class RoundBatches:
    """The batches of drafting, verification and the draft's extend pass of ``batch`` requests.

    Attributes:
        width: tokens of each request in the extend pass: the longest path that can be accepted, or
            the whole tree for SGLang's own backends, which know no other width.
    """

    def __init__(
        self, inputs: RoundInputs, batch: int, shape: TreeShape, width: int, spec_algorithm: Any
    ) -> None:
        device = inputs.rows.device
        self.batch = batch
        self.width = width
        self.seq_lens = inputs.seq_lens[:batch]
        self.rows = inputs.rows[:batch]
        self.draft_slots = _integers(batch * shape.top_k * shape.steps, device)
        self.node_slots = _integers(batch * shape.nodes, device)
        self.extend_slots = _integers(batch * width, device)
        self.draft_positions = _integers(batch * shape.top_k, device)
        self.extend_positions = _integers(batch * width, device)
        self.extended_lens = _integers(batch, device)
        slots = max(shape.top_k * shape.steps, shape.nodes)
        self._columns = torch.arange(slots, device=device)
        self._spec_algorithm = spec_algorithm
        self._shape = shape
        draft_input = EagleDraftInput(
            topk_p=inputs.probs[:batch],
            topk_index=inputs.token_ids[:batch],
            hidden_states=inputs.hidden[:batch],
            capture_hidden_mode=CaptureHiddenMode.LAST,
        )
        self.draft = self._make(
            ForwardMode.DECODE, self.seq_lens, self.draft_slots, draft_input, CaptureHiddenMode.LAST
        )
        self.draft.positions = self.draft_positions

    def verify(self, verify_input: Any, logits: Tensor) -> ForwardBatch:
        """The target's batch for the trees of ``verify_input``; logits go to ``logits``."""
        made = self._make(
            ForwardMode.TARGET_VERIFY,
            self.seq_lens,
            self.node_slots,
            verify_input,
            CaptureHiddenMode.FULL,
        )
        made.input_ids, made.positions = verify_input.draft_token, verify_input.positions
        made.next_token_logits_buffer = logits
        made.global_forward_mode = ForwardMode.TARGET_VERIFY
        made.orig_seq_lens = self.seq_lens
        return made

    def extend(self) -> ForwardBatch:
        """The draft's batch over accepted tokens: ids, states and counts are still to be set."""
        extend_input = EagleDraftExtendInput(
            num_tokens_per_req=self.width, num_tokens_for_logprob_per_req=self.width
        )
        made = self._make(
            ForwardMode.DRAFT_EXTEND_V2,
            self.extended_lens,
            self.extend_slots,
            extend_input,
            CaptureHiddenMode.LAST,
        )
        widths = torch.full((self.batch,), self.width, dtype=torch.int32, device=self.rows.device)
        made.positions = self.extend_positions
        made.extend_seq_lens, made.extend_seq_lens_cpu = widths, [self.width] * self.batch
        spec: Any = made.spec_info
        spec.extend_seq_lens_tensor, spec.extend_seq_lens_cpu = widths, [self.width] * self.batch
        return made

    def locate(self, req_to_token: Tensor) -> None:
        """Set the slots and positions of all phases, from the lengths and the table of slots.

        Drafts and nodes take the slots that SGLang has reserved behind the context; each phase
        writes them anew.
        """
        columns = self.seq_lens[:, None] + self._columns
        slots = req_to_token[self.rows[:, None], columns]
        for target in (self.draft_slots, self.node_slots, self.extend_slots):
            target.view(self.batch, -1).copy_(slots[:, : target.shape[0] // self.batch])
        self.draft_positions.view(self.batch, -1).copy_(
            columns[:, :1].expand(-1, self._shape.top_k)
        )
        self.extend_positions.view(self.batch, -1).copy_(columns[:, : self.width])

    def _make(
        self, mode: Any, seq_lens: Tensor, slots: Tensor, spec_info: Any, hidden_mode: Any
    ) -> ForwardBatch:
        unset: Any = None
        return ForwardBatch(
            forward_mode=mode,
            batch_size=self.batch,
            input_ids=unset,
            req_pool_indices=self.rows,
            seq_lens=seq_lens,
            out_cache_loc=slots,
            # As in a round of SGLang's that does not wait for lengths on the host.
            seq_lens_sum=unset,
            return_logprob=False,
            spec_algorithm=self._spec_algorithm,
            spec_info=spec_info,
            capture_hidden_mode=hidden_mode,
        )


def _integers(count: int, device: torch.device) -> Tensor:
    return torch.zeros(count, dtype=torch.int64, device=device)
