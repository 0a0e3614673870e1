"""One forward pass of the attention backend ``frspec``: what it shares, takes and refuses."""

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sglang.srt.layers.attention.triton_backend import TritonAttnBackend
from sglang.srt.layers.radix_attention import AttentionType
from torch import Tensor

from frspec_kernels.tree_attention_inputs import CACHE_DTYPES, DraftTree
from sgl_frspec.attention_backend_buffers import Contexts
from sgl_frspec.attention_backend_registration import NAME
from sgl_frspec.options import OptionError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner


MAX_HEAD_DIM = 256


@dataclass(frozen=True)
class TreePass:
    """What all layers of one forward pass share."""

    tree: DraftTree  # without keys, or with the cache's slots
    contexts: Contexts
    window_contexts: Contexts  # of layers with a sliding window
    swa_out_cache_loc: Tensor | None = None  # where those layers write, if they have own pools


def refuse_unsupported(backend: TritonAttnBackend, model_runner: "ModelRunner") -> None:
    """Name what the model or the options ask for that tree attention lacks.

    Raises:
        OptionError: with the remedy.
    """
    cache: Any = model_runner.token_to_kv_pool.dtype
    head_dim: Any = model_runner.model_config.head_dim
    reasons = {
        "multi-head latent attention": backend.use_mla,
        "decode context parallelism": backend.dcp_size > 1,
        "deterministic inference": backend.enable_deterministic,
        f"a head dim of {head_dim}": head_dim > MAX_HEAD_DIM,
        f"a KV cache of {cache}": cache not in CACHE_DTYPES,
    }
    for reason, present in reasons.items():
        if present:
            raise OptionError(
                f"--attention-backend {NAME} does not support {reason}; use --attention-backend"
                " triton"
            )


def refuse_layer(layer: "RadixAttention", score_mod: Any) -> None:
    """Name what a layer asks for that tree attention lacks: wrong numbers are worse.

    Raises:
        OptionError: with the remedy.
    """
    reasons = {
        "cross attention": layer.is_cross_attention,
        "encoder-only attention": layer.attn_type == AttentionType.ENCODER_ONLY,
        "a temperature by length": layer.xai_temperature_len > 0,
        "a cap other than tanh": layer.logit_cap > 0 and layer.logit_capping_method != "tanh",
        "changed scores": score_mod is not None,
    }
    for reason, present in reasons.items():
        if present:
            raise OptionError(
                f"--attention-backend {NAME} does not support {reason} in layer {layer.layer_id};"
                " use --attention-backend triton"
            )


def mask_of(forward_batch: "ForwardBatch") -> Tensor:
    """The mask of the trees to verify.

    Raises:
        ValueError: there is none.
    """
    spec: Any = forward_batch.spec_info
    if spec is None or spec.custom_mask is None:
        raise ValueError(f"{NAME} verifies trees: the batch to verify has no mask")
    return spec.custom_mask


def node_depths(forward_batch: "ForwardBatch", batch: int) -> Tensor:
    """``[B * N]`` positions of the nodes, from the end of their request's context."""
    seq_lens = forward_batch.seq_lens.view(batch, 1)
    return (forward_batch.positions.view(batch, -1) - seq_lens).view(-1)


def uniform_extend(forward_batch: "ForwardBatch") -> int:
    """Tokens of each request in a draft-extend pass; 0 in other passes or where they differ."""
    tokens: Any = forward_batch.out_cache_loc
    lengths: Any = forward_batch.extend_seq_lens_cpu
    if not forward_batch.forward_mode.is_draft_extend_v2() or (lengths and len(set(lengths)) > 1):
        return 0
    width, rest = divmod(tokens.shape[0], max(forward_batch.batch_size, 1))
    return 0 if rest else width


@contextmanager
def without_mask(forward_batch: "ForwardBatch") -> "Iterator[None]":
    """SGLang's preparation would copy the mask into a buffer of its own layout."""
    spec: Any = forward_batch.spec_info
    mask = getattr(spec, "custom_mask", None)
    if mask is not None:
        spec.custom_mask = None
    try:
        yield
    finally:
        if mask is not None:
            spec.custom_mask = mask
