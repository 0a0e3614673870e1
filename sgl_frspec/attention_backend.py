"""SGLang's attention backend ``frspec``: Triton, with tree attention where speculation needs it.

Verification and the draft's extend pass run :func:`frspec_kernels.tree_attention.tree_attention`:
the context is split over the GPU and read once for all nodes of a request, and the tree's mask is
bits over its nodes, not bytes over the context. Everything else is SGLang's Triton backend.
"""

import dataclasses
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.layers.attention.triton_backend import TritonAttnBackend
from sglang.srt.layers.attention.verify_mask import VerifyMask
from sglang.srt.mem_cache.memory_pool import KVWriteLoc, MHATokenToKVPool
from sglang.srt.speculative.eagle_utils import TreeMaskMode
from torch import Tensor

from frspec_kernels.context_snapshot import pack_byte_mask
from frspec_kernels.tree_attention import tree_attention
from frspec_kernels.tree_attention_inputs import (
    AttentionShape,
    DraftTree,
    PagedContext,
)
from sgl_frspec.attention_backend_buffers import Contexts, SharedBuffers, shared_buffers
from sgl_frspec.attention_backend_pass import (
    TreePass,
    mask_of,
    node_depths,
    refuse_layer,
    refuse_unsupported,
    uniform_extend,
    without_mask,
)
from sgl_frspec.attention_backend_registration import NAME

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner


class FrSpecAttentionBackend(TritonAttnBackend):
    """Attention of the target, and of the draft's extend passes."""

    def __init__(
        self,
        model_runner: "ModelRunner",
        skip_prefill: bool = False,
        kv_indptr_buf: Tensor | None = None,
    ) -> None:
        super().__init__(model_runner, skip_prefill, kv_indptr_buf)
        refuse_unsupported(self, model_runner)
        self.shared: SharedBuffers = shared_buffers(self.req_to_token_pool, self.req_to_token)
        # Pools of other kinds translate slots; SGLang's own lists of them are used there.
        self.copies_contexts = type(self.token_to_kv_pool) is MHATokenToKVPool
        self.has_windows = (self.sliding_window_size or 0) > 0
        self.tree_pass: TreePass | None = None
        self.mask_words: Tensor | None = None
        self.depths: Tensor | None = None
        self.verifies = bool(self.num_draft_tokens) and not (self.is_draft_runner or skip_prefill)
        if self.verifies:
            self._verify_mask = self._byte_mask(self.req_to_token.shape[0])
        self._extend_widths: dict[int, int] = {}

    def _byte_mask(self, max_bs: int) -> VerifyMask:
        """Where SGLang's own tree builder writes: bytes over the tree's nodes alone."""
        cells = max_bs * self.num_draft_tokens**2
        buffer = torch.zeros(cells, dtype=torch.bool, device=self.device)
        return VerifyMask(buffer=buffer, mode=TreeMaskMode.QLEN_ONLY, max_bs=max_bs)

    # Before a forward pass.

    def init_forward_metadata(self, forward_batch: "ForwardBatch") -> None:
        """Prepare a pass that no CUDA graph runs."""
        self.tree_pass = None
        batch = forward_batch.batch_size
        if forward_batch.forward_mode.is_target_verify():
            nodes = self.num_draft_tokens
            mask = self._packed(mask_of(forward_batch), batch)
            depths = node_depths(forward_batch, batch) if self.has_windows else None
            tree = DraftTree(self.shared.chains(batch, nodes).qo_indptr, nodes, mask, depths=depths)
        elif width := uniform_extend(forward_batch):
            tree = self.shared.chains(batch, width)
        else:
            super().init_forward_metadata(forward_batch)
            return
        if self.copies_contexts:
            verify = forward_batch.forward_mode.is_target_verify()
            contexts = self.shared.copy(
                forward_batch.req_pool_indices,
                forward_batch.seq_lens,
                tail=0 if verify else tree.max_nodes,
            )
            self.shared.verify_copies |= verify
            self.tree_pass = TreePass(tree, contexts, contexts)
            return
        with without_mask(forward_batch):
            super().init_forward_metadata(forward_batch)
        self.tree_pass = self._pass_over_lists(tree)

    def init_cuda_graph_state(
        self,
        max_bs: int,
        max_num_tokens: int,
        kv_indices_buf: Tensor | None = None,
        cuda_graph_num_kv_splits_buf: Tensor | None = None,
    ) -> None:
        """Memory for the passes in CUDA graphs; SGLang's own buffers only where they are used."""
        self.shared.reserve(max_bs)
        mask = self._verify_mask
        if not (self.copies_contexts and self.num_draft_tokens):
            super().init_cuda_graph_state(
                max_bs, max_num_tokens, kv_indices_buf, cuda_graph_num_kv_splits_buf
            )
        if self.verifies:
            self._verify_mask = mask  # SGLang has put one over whole contexts in its place
            nodes = self.num_draft_tokens
            rows, words = max_bs * nodes, -(-nodes // 32)
            self.mask_words = torch.zeros(rows, words, dtype=torch.int32, device=self.device)
            self.depths = torch.zeros(rows, dtype=torch.int64, device=self.device)

    def init_forward_metadata_out_graph(
        self, forward_batch: "ForwardBatch", in_capture: bool = False
    ) -> None:
        """Refresh what a CUDA graph reads: the mask, unless it was built in place."""
        mode = forward_batch.forward_mode
        batch = forward_batch.batch_size
        verify = mode.is_target_verify()
        if not (verify or mode.is_draft_extend_v2()):
            self.tree_pass = None
            super().init_forward_metadata_out_graph(forward_batch, in_capture)
            return
        if not self.copies_contexts:
            with without_mask(forward_batch):
                super().init_forward_metadata_out_graph(forward_batch, in_capture)
        if in_capture:
            self._make_pass_for_capture(forward_batch)
        elif verify and not getattr(forward_batch, "actual_forward_mode", mode).is_idle():
            self._keep_mask(mask_of(forward_batch), batch)
        # The scheduler may change the table while the extend pass runs, not before it starts.
        if not verify and self.copies_contexts and not self._copied_earlier(draft_extend=True):
            width = self._extend_widths[batch]
            self.shared.copy(
                forward_batch.req_pool_indices[:batch], forward_batch.seq_lens[:batch], tail=width
            )

    def init_forward_metadata_in_graph(self, forward_batch: "ForwardBatch") -> None:
        """What every replay does first: copy the contexts, unless drafting has just done so."""
        super().init_forward_metadata_in_graph(forward_batch)
        if not forward_batch.forward_mode.is_target_verify():
            return
        batch = forward_batch.batch_size
        if self.copies_contexts and not self._copied_earlier():
            self.shared.copy(forward_batch.req_pool_indices, forward_batch.seq_lens)
            self.shared.verify_copies = True
        if self.has_windows and self.depths is not None:
            positions = forward_batch.positions.view(batch, -1)
            torch.sub(
                positions,
                forward_batch.seq_lens.view(batch, 1),
                out=self.depths[: positions.numel()].view_as(positions),
            )

    def update_verify_buffers_to_fill_after_draft(
        self, spec_info: Any, cuda_graph_bs: int | None
    ) -> None:
        """The tree came after the plan: take its mask again."""
        if cuda_graph_bs is not None:
            self._keep_mask(spec_info.custom_mask, cuda_graph_bs)

    def _copied_earlier(self, *, draft_extend: bool = False) -> bool:
        return self.shared.draft_decode_copies or (draft_extend and self.shared.verify_copies)

    def _make_pass_for_capture(self, forward_batch: "ForwardBatch") -> None:
        batch = forward_batch.batch_size
        if forward_batch.forward_mode.is_target_verify():
            nodes = self.num_draft_tokens
            words, depths = self.mask_words, self.depths
            assert words is not None
            assert depths is not None
            tree = DraftTree(
                self.shared.chains(batch, nodes).qo_indptr,
                nodes,
                words[: batch * nodes],
                depths=depths[: batch * nodes],
            )
        else:
            width = forward_batch.out_cache_loc.shape[0] // batch
            self._extend_widths[batch] = width
            tree = self.shared.chains(batch, width)
        if self.copies_contexts:
            contexts = self.shared.contexts(batch)
            self.tree_pass = TreePass(tree, contexts, contexts)
        else:
            self.tree_pass = self._pass_over_lists(tree)

    def _pass_over_lists(self, tree: DraftTree) -> TreePass:
        """A pass over the lists of slots that SGLang has made."""
        made: Any = self.forward_metadata
        contexts = Contexts(made.kv_indptr, made.kv_indices, None)
        windows = contexts
        if self.has_windows and made.window_kv_indices is not None:
            windows = Contexts(made.window_kv_indptr, made.window_kv_indices, None)
        return TreePass(tree, contexts, windows, made.swa_out_cache_loc)

    def _keep_mask(self, mask: Tensor, batch: int) -> None:
        """Bring the mask to where the graphs read it: nothing to do if it was built there."""
        words = self.mask_words
        assert words is not None
        if mask.dtype != torch.int32:
            pack_byte_mask(self._cells(mask, batch), self.num_draft_tokens, words)
        elif mask.data_ptr() != words.data_ptr():
            words[: mask.shape[0]].copy_(mask)

    def _packed(self, mask: Tensor, batch: int) -> Tensor:
        if mask.dtype == torch.int32:
            return mask[: batch * self.num_draft_tokens]
        nodes = self.num_draft_tokens
        words = mask.new_empty(batch * nodes, -(-nodes // 32), dtype=torch.int32)
        pack_byte_mask(self._cells(mask, batch), nodes, words)
        return words

    def _cells(self, mask: Tensor, batch: int) -> Tensor:
        """The bytes of the batch's trees."""
        cells = self.num_draft_tokens**2
        ours = (
            self._verify_mask is not None and mask.data_ptr() == self._verify_mask.buffer.data_ptr()
        )
        if ours:
            return mask[: batch * cells]
        if mask.numel() % cells or mask.numel() > batch * cells:
            raise ValueError(
                f"the tree's mask has {mask.numel()} entries for {batch} requests of"
                f" {self.num_draft_tokens} nodes; {NAME} takes masks over the nodes alone"
            )
        return mask

    # In a forward pass.

    def forward_extend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layer: "RadixAttention",
        forward_batch: "ForwardBatch",
        save_kv_cache: bool = True,
        sinks: Tensor | None = None,
        score_mod: Any = None,
        aux_tensors: Any = None,
    ) -> Any:
        """Attention of prefill, verify and draft-extend passes: ``[tokens, Hq * Dv]``."""
        mode = forward_batch.forward_mode
        if self.tree_pass is None or not (mode.is_target_verify() or mode.is_draft_extend_v2()):
            return super().forward_extend(
                q, k, v, layer, forward_batch, save_kv_cache, sinks, score_mod, aux_tensors
            )
        refuse_layer(layer, score_mod)
        tree = self.tree_pass.tree
        if k is None:  # a layer that shares another's keys: they are in the cache
            tree = dataclasses.replace(tree, slots=forward_batch.out_cache_loc)
        else:
            k = k.view(-1, layer.tp_k_head_num, layer.qk_head_dim)
            v = v.view(-1, layer.tp_v_head_num, layer.v_head_dim)
            if save_kv_cache:
                self.save(k, v, layer, forward_batch, keep=True)
            tree = dataclasses.replace(tree, k=k, v=v)
        return self.attend(q, tree, layer, sinks)

    def save(
        self,
        k: Tensor,
        v: Tensor,
        layer: "RadixAttention",
        forward_batch: "ForwardBatch",
        *,
        keep: bool,
    ) -> None:
        """Write keys and values to the cache; a scaled cache may change them unless kept."""
        assert self.tree_pass is not None
        location = KVWriteLoc(forward_batch.out_cache_loc, self.tree_pass.swa_out_cache_loc)
        if layer.k_scale is None:
            self._set_kv_buffer(forward_batch, layer, location, k, v)
            return
        if keep:
            k, v = k.clone(), v.clone()
        self._set_kv_buffer(forward_batch, layer, location, k, v, layer.k_scale, layer.v_scale)

    def attend(
        self, q: Tensor, tree: DraftTree, layer: "RadixAttention", sinks: Tensor | None
    ) -> Tensor:
        """Tree attention of one layer: ``[tokens, Hq * Dv]``."""
        made = self.tree_pass
        assert made is not None
        window = -1 if layer.sliding_window_size is None else layer.sliding_window_size
        contexts = made.contexts if window < 0 else made.window_contexts
        scales: Any = (1.0, 1.0)
        if layer.k_scale is not None and layer.v_scale is not None:
            scales = layer.k_scale_float, layer.v_scale_float
        context = PagedContext(
            self.token_to_kv_pool.get_key_buffer(layer.layer_id),
            self.token_to_kv_pool.get_value_buffer(layer.layer_id),
            contexts.starts,
            contexts.slots.view(-1),
            contexts.lengths,
            k_scale=scales[0],
            v_scale=scales[1],
        )
        shape = AttentionShape(
            layer.tp_q_head_num, context.k_cache.shape[1], layer.qk_head_dim, layer.v_head_dim
        )
        q = q.view(-1, shape.q_heads, shape.head_dim)
        out = q.new_empty(q.shape[0], shape.q_heads, shape.head_dim_v)
        tree_attention(
            q,
            context,
            tree,
            sm_scale=layer.scaling,
            logit_cap=layer.logit_cap,
            window_left=window,
            sinks=sinks,
            out=out,
            workspace=self.shared.workspace(shape, tree.batch, tree.max_nodes),
        )
        return out.view(out.shape[0], -1)
