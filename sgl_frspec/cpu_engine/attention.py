"""SGLang's attention backend ``frspec_cpu``: PyTorch's SDPA, with the masks that token trees need.

SGLang's own ``torch_native`` backend has no verify or draft mode, and its ``intel_amx`` one needs a
kernel library. This one serves decode, extend (chunked and over cached prefixes), target verify,
draft decode and draft extend, in any float type, with grouped queries and any page size.
"""

from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from torch import Tensor

from sgl_frspec.cpu_engine import ATTENTION_BACKEND
from sgl_frspec.cpu_engine.attend import attend
from sgl_frspec.cpu_engine.plan import (
    RequestPlan,
    plan_decode,
    plan_draft_decode,
    plan_extend,
    plan_target_verify,
)

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner


class CPUAttentionBackend(AttentionBackend):
    """Attention of the target, and of the draft's extend passes."""

    def __init__(self, model_runner: "ModelRunner") -> None:
        super().__init__()
        if model_runner.use_mla_backend:
            raise NotImplementedError(
                f"{ATTENTION_BACKEND} has no multi-head latent attention; run this model on a GPU"
            )
        # SGLang leaves both untyped or optional until the pools are made, which is before this.
        self.req_to_token_pool: Any = model_runner.req_to_token_pool
        self.token_to_kv_pool: Any = model_runner.token_to_kv_pool
        self.max_context_len = model_runner.model_config.context_len
        self.plans: list[RequestPlan] = []

    def init_forward_metadata(self, forward_batch: "ForwardBatch") -> None:
        """Plan every request of the batch; all layers share the plan."""
        mode = forward_batch.forward_mode
        if mode.is_idle():
            self.plans = []
            return
        rows = self.rows(forward_batch)
        if mode.is_decode():
            self.plans = plan_decode(rows, forward_batch.seq_lens.tolist())
        elif mode.is_target_verify():
            spec: Any = forward_batch.spec_info
            self.plans = plan_target_verify(
                rows, forward_batch.seq_lens.tolist(), spec.custom_mask, spec.draft_token_num
            )
        else:
            self.plans = plan_extend(
                rows,
                _lengths(forward_batch.extend_prefix_lens),
                _lengths(forward_batch.extend_seq_lens),
            )

    def rows(self, forward_batch: "ForwardBatch") -> Tensor:
        """The batch's rows of ``req_to_token``, ``[B, C]``."""
        return self.req_to_token_pool.req_to_token[forward_batch.req_pool_indices.long()]

    def forward_extend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layer: "RadixAttention",
        forward_batch: "ForwardBatch",
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> Tensor:
        """Attention of extend, verify and draft-extend passes: ``[tokens, Hq * Dv]``."""
        return self._attend(q, k, v, layer, forward_batch, save_kv_cache, kwargs)

    def forward_decode(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layer: "RadixAttention",
        forward_batch: "ForwardBatch",
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> Tensor:
        """Attention of decode passes, the draft's included: ``[tokens, Hq * Dv]``."""
        return self._attend(q, k, v, layer, forward_batch, save_kv_cache, kwargs)

    def support_triton(self) -> bool:  # pyright: ignore[reportIncompatibleMethodOverride]
        """SGLang asks before it launches Triton helpers around attention."""
        return False

    def _attend(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: "RadixAttention",
        forward_batch: "ForwardBatch",
        save_kv_cache: bool,
        extra: dict[str, Any],
    ) -> Tensor:
        _refuse_unsupported(layer, extra)
        if save_kv_cache and k is not None and v is not None:
            location = KVWriteLoc(forward_batch.out_cache_loc, None)
            self.token_to_kv_pool.set_kv_buffer(layer, location, k, v)
        queries = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)
        keys = self.token_to_kv_pool.get_key_buffer(layer.layer_id)
        values = self.token_to_kv_pool.get_value_buffer(layer.layer_id)
        # Rows past the plans (padding) stay zero: nothing reads them, and they must stay finite.
        out = queries.new_zeros(queries.shape[0], layer.tp_q_head_num, layer.v_head_dim)
        # SGLang counts the positions before the query's own; -1 and None stand for no window.
        size = layer.sliding_window_size
        window = None if size is None or size < 0 else size
        for plan in self.plans:
            out[plan.start : plan.stop] = attend(queries, keys, values, plan, layer.scaling, window)
        return out.view(out.shape[0], -1)


class CPUDraftStepBackend(CPUAttentionBackend):
    """Attention of one draft step; the multi-step backend sets its plan."""

    def init_forward_metadata(self, forward_batch: "ForwardBatch") -> None:
        """Nothing to do: SGLang plans all steps at once, through the multi-step backend."""


class CPUMultiStepDraftBackend:
    """The draft's decode steps: one backend a step, planned together before the first."""

    needs_cpu_seq_lens = True

    def __init__(self, model_runner: "ModelRunner", topk: int, speculative_num_steps: int) -> None:
        self.topk = topk
        self.speculative_num_steps = speculative_num_steps
        self.page_size = model_runner.page_size
        # The last step's tokens are never fed back, so it needs no forward pass.
        self.attn_backends = [
            CPUDraftStepBackend(model_runner) for _ in range(speculative_num_steps - 1)
        ]

    def init_forward_metadata(self, forward_batch: "ForwardBatch") -> None:
        """Plan all steps; ``seq_lens`` are the committed lengths."""
        rows = self.attn_backends[0].rows(forward_batch)
        prefix_lens = forward_batch.seq_lens.tolist()
        for step, backend in enumerate(self.attn_backends):
            backend.plans = plan_draft_decode(
                rows, prefix_lens, self.topk, self.speculative_num_steps, step, self.page_size
            )


def _refuse_unsupported(layer: "RadixAttention", extra: dict[str, Any]) -> None:
    """Wrong numbers are worse than an error: name what this backend would ignore."""
    unsupported = [
        name
        for name, present in (
            ("cross attention", layer.is_cross_attention),
            ("encoder-only attention", layer.attn_type == AttentionType.ENCODER_ONLY),
            ("logit soft-capping", bool(layer.logit_cap)),
            *((name, value is not None) for name, value in extra.items()),
        )
        if present
    ]
    if unsupported:
        raise NotImplementedError(
            f"{ATTENTION_BACKEND} does not implement {', '.join(unsupported)}; run this model on a "
            "GPU"
        )


def _lengths(lengths: "Tensor | list[int] | None") -> list[int]:
    if isinstance(lengths, torch.Tensor):
        return lengths.tolist()
    return list(lengths or [])
