"""The draft's last layer over the reduced vocabulary: from hidden states to the next proposals.

SGLang's draft models end in a ``logits_processor`` whose logits the worker then turns into
probabilities, top-k and token ids. :class:`DraftHead` takes its place and does all of it in one
pass over the reduced head, so that no logits are ever written.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from torch import Tensor

from frspec_kernels.reduced_topk import (
    TopK,
    Workspace,
    allocate_output,
    allocate_workspace,
    reduced_vocab_topk,
)
from sgl_frspec.options import OptionError


class DraftHead(torch.nn.Module):
    """Proposals of a draft model, in place of its logits.

    A pass leaves those of every row when drafting, of the last accepted token of each request after
    a verification, of the last token of each prompt otherwise.
    """

    def __init__(self, top_k: int, relayed: int, token_ids: Tensor, stock: Any) -> None:
        """Make a head for a draft.

        Args:
            top_k: proposals of a draft step.
            relayed: proposals that a round starts from.
            token_ids: ``[V]`` those of the head's rows.
            stock: the module replaced.
        """
        super().__init__()
        for name in ("logit_scale", "final_logit_softcapping"):
            if getattr(stock, name, None):
                raise OptionError(
                    f"the draft has {name}, which FRSPEC's head does not apply; add --frspec-stock"
                    " head"
                )
        self.top_k = top_k
        self.relayed = relayed
        self.token_ids = token_ids
        self._last: TopK | None = None
        self._batch = 0
        self._extended: TopK | None = None
        self._step_out: TopK | None = None
        self._workspace: Workspace | None = None

    def reserve(self, batch: int, head: Tensor, dtype: torch.dtype) -> None:
        """Memory for passes over up to ``batch`` requests, to be captured in CUDA graphs."""
        self._batch = batch
        self._extended = allocate_output(batch, self.relayed, self.token_ids.device)
        self._workspace = allocate_workspace(
            batch * self.top_k,
            *head.shape,
            dtype=dtype,
            device=head.device,
            head_dtype=head.dtype,
        )

    def write_step_to(self, out: TopK) -> None:
        """Let the next draft step fill the first rows of ``out``, with as many ids as it holds."""
        self._step_out = out

    def forward(
        self,
        input_ids: Tensor,
        hidden_states: Tensor,
        lm_head: Any,
        forward_batch: Any,
        *unused: Any,
        **also_unused: Any,
    ) -> LogitsProcessorOutput:
        """Called by the draft model with its last hidden states ``[tokens, H]``."""
        mode = forward_batch.forward_mode
        out, k = None, self.relayed
        if mode.is_draft_extend_v2():
            hidden_states = hidden_states[accepted_rows(forward_batch)]
            out = self._reserved(hidden_states.shape[0])
        elif mode.is_extend():
            hidden_states = hidden_states[forward_batch.extend_seq_lens.cumsum(0) - 1]
        elif self._step_out is None:
            k = self.top_k
        else:
            out = TopK(*(tensor[: hidden_states.shape[0]] for tensor in self._step_out))
            k, self._step_out = out.probs.shape[1], None
        self._last = self.top(hidden_states, lm_head.weight, k, out)
        return LogitsProcessorOutput(self._last.probs, hidden_states=hidden_states)

    def top(self, hidden: Tensor, head: Tensor, k: int, out: TopK | None = None) -> TopK:
        """The ``k`` best ids of each row of ``hidden`` [B, H], over the rows of ``head``."""
        if hidden.device.type == "cpu":
            found = reduced_topk_cpu(hidden, head, k, self.token_ids)
            for target, value in zip(out or (), found, strict=out is not None):
                target.copy_(value)
            return out or found
        workspace = self._workspace if hidden.shape[0] <= self._batch * self.top_k else None
        return reduced_vocab_topk(
            hidden, head, k, token_map=self.token_ids, workspace=workspace, out=out
        )

    def after_verification(self, batch: int) -> TopK:
        """The proposals of the last draft-extend pass, also of one replayed as a CUDA graph."""
        return self._reserved(batch) or self.last()

    def last(self) -> TopK:
        """The proposals of the last pass that was not a CUDA graph's."""
        if self._last is None:
            raise RuntimeError("the draft has not run")
        return self._last

    def _reserved(self, batch: int) -> TopK | None:
        if self._extended is None or batch > self._batch:
            return None
        return TopK(*(tensor[:batch] for tensor in self._extended))


class _NoLogits:
    """In place of the logits buffers that SGLang's graphs share: rows of one number."""

    def __init__(self, device: Any) -> None:
        self._device = device

    def get_logits_buffer(self, vocab_size: int, *, rows: int) -> Tensor:
        """One float32 a row, which nobody writes; ``vocab_size`` is what SGLang asks for."""
        return torch.zeros(rows, 1, device=self._device)


@contextlib.contextmanager
def without_logits(draft_runner: Any) -> Iterator[None]:
    """Let the draft's graphs be captured without a buffer for logits.

    SGLang's graph of the extend pass has one of requests x nodes x ids, as float32: 503 MB for 64
    requests, 60 nodes and 32,768 ids. The passes of a :class:`DraftHead` leave it as it is.
    """
    shared = draft_runner.graph_shared_output
    draft_runner.graph_shared_output = _NoLogits(draft_runner.device)
    try:
        yield
    finally:
        draft_runner.graph_shared_output = shared


def accepted_rows(forward_batch: Any) -> Tensor:
    """Row of the last accepted token of each request, in an extend pass after a verification."""
    accepted = forward_batch.spec_info.num_accept_tokens
    width = forward_batch.input_ids.shape[0] // accepted.shape[0]
    first = torch.arange(0, forward_batch.input_ids.shape[0], width, device=accepted.device)
    return first + accepted - 1


def reduced_topk_cpu(hidden: Tensor, head: Tensor, k: int, token_ids: Tensor) -> TopK:
    """:func:`frspec_kernels.reduced_topk.reduced_vocab_topk` without a GPU, in any float type.

    ``token_ids`` ascend, so a stable sort leaves equal scores in the order of their ids.
    """
    logits = (hidden @ head.T).float()
    values, rows = logits.sort(dim=1, descending=True, stable=True)
    lse = logits.logsumexp(1)
    return TopK((values[:, :k] - lse[:, None]).exp(), token_ids[rows[:, :k]], lse)
