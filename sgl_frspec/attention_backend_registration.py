"""Make ``frspec`` known to SGLang: its name, the draft's backends, and when it is the default.

Importing this module imports neither torch nor sglang.
"""

import logging
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sglang.srt.model_executor.model_runner import ModelRunner

    from sgl_frspec.attention_backend import FrSpecAttentionBackend

logger = logging.getLogger(__name__)

NAME = "frspec"
ALGORITHM = "FRSPEC"
_FACTORY = "sglang.srt.speculative.draft_utils.DraftBackendFactory"
# Where SGLang chooses the backend for servers that name none, by release.
_DEFAULT_0_5_17 = "sglang.srt.server_args.ServerArgs._get_default_attn_backend"
_DEFAULT = "sglang.srt.arg_groups.model_override_base.get_default_attn_backend"


def register_attention_backend() -> None:
    """Register ``frspec`` for ``--attention-backend`` and its siblings, and for drafts."""
    from sglang.srt.layers.attention import attention_registry
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    from sglang.srt.server_args import ATTENTION_BACKEND_CHOICES, ServerArgs

    choices: list[str] = ATTENTION_BACKEND_CHOICES
    choices.append(NAME)
    attention_registry.register_attention_backend(NAME)(_create)
    for method, hook in (
        ("create_decode_backend", _decode_hook),
        ("create_draft_extend_backend", _draft_extend_hook),
    ):
        HookRegistry.register(f"{_FACTORY}.{method}", hook, HookType.AROUND)
    old = hasattr(ServerArgs, "_get_default_attn_backend")
    HookRegistry.register(_DEFAULT_0_5_17 if old else _DEFAULT, _default_hook, HookType.AROUND)


def _create(model_runner: "ModelRunner") -> "FrSpecAttentionBackend":
    from sgl_frspec.attention_backend import FrSpecAttentionBackend

    return FrSpecAttentionBackend(model_runner)


def _decode_hook(original: Any, factory: Any) -> Any:
    if _chosen(factory, decode=True) != NAME:
        return original(factory)
    if factory.speculative_num_steps <= 1:
        return None
    from sgl_frspec.attention_backend_draft import create_decode_backend

    return create_decode_backend(
        factory.draft_model_runner, factory.topk, factory.speculative_num_steps
    )


def _draft_extend_hook(original: Any, factory: Any) -> Any:
    from sglang.srt.runtime_context import get_spec

    if _chosen(factory, decode=get_spec().speculative_attention_mode == "decode") != NAME:
        return original(factory)
    return _create(factory.draft_model_runner)


def _chosen(factory: Any, *, decode: bool) -> str:
    """The backend that the factory would make, by name."""
    if factory.draft_attn_backend:
        return factory.draft_attn_backend
    arguments = getattr(factory, "server_args", None)
    if arguments is not None:
        return arguments.get_attention_backends()[decode]
    from sglang.srt.runtime_context import attention_backends

    return attention_backends()[decode]


def _default_hook(original: Any, server_args: Any, use_mla_backend: bool, model_config: Any) -> str:
    """FRSPEC servers that name no backend get ``frspec``, unless something speaks against it."""
    if (server_args.speculative_algorithm or "").upper() != ALGORITHM:
        return original(server_args, use_mla_backend, model_config)
    obstacles = {
        "the device is not CUDA": server_args.device != "cuda",
        "the model has multi-head latent attention": use_mla_backend,
        "--enable-deterministic-inference": server_args.enable_deterministic_inference,
        "--kv-cache-dtype": server_args.kv_cache_dtype
        not in ("auto", "bf16", "bfloat16", "fp8_e4m3"),
        "--dcp-size": server_args.dcp_size > 1,
    }
    found = [obstacle for obstacle, present in obstacles.items() if present]
    if found:
        chosen = original(server_args, use_mla_backend, model_config)
        logger.info("FRSPEC: attention backend %s; not %s (%s)", chosen, NAME, ", ".join(found))
        return chosen
    logger.info(
        "FRSPEC: attention backend %s, for target and draft (--attention-backend triton for"
        " SGLang's own)",
        NAME,
    )
    return NAME
