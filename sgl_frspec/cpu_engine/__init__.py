"""The real SGLang engine on a machine without a GPU.

Three parts, all inactive unless ``SGLANG_USE_CPU_ENGINE=1`` (``frspec serve`` sets it where there
is no GPU): stand-ins for packages without a CPU wheel (``stand_ins/``), an attention backend with
tree masks (``attention``), and the hooks that make SGLang's speculative workers use it. Importing
this package imports neither torch nor sglang.
"""

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sglang.srt.model_executor.model_runner import ModelRunner

    from sgl_frspec.cpu_engine.attention import CPUAttentionBackend, CPUMultiStepDraftBackend

ATTENTION_BACKEND = "frspec_cpu"
_LAST_SLOTS = "sglang.srt.mem_cache.allocation.get_last_loc"
_DRAFT_BACKEND_FACTORY = "sglang.srt.speculative.draft_utils.DraftBackendFactory"


def is_enabled() -> bool:
    """Whether this process belongs to a CPU engine."""
    return os.environ.get("SGLANG_USE_CPU_ENGINE") == "1"


def register() -> None:
    """Register the attention backend with SGLang; call it from the plugin's entry point.

    Does nothing unless the CPU engine is enabled. Raises RuntimeError if CUDA is available.
    """
    if not is_enabled():
        return
    import torch

    if torch.cuda.is_available():
        raise RuntimeError(
            "SGLANG_USE_CPU_ENGINE=1 on a machine with CUDA: unset it, or hide the GPU "
            "(CUDA_VISIBLE_DEVICES='')"
        )
    from sglang.srt.arg_groups.choices import add_attention_backend_choices
    from sglang.srt.layers.attention.attention_registry import register_attention_backend

    add_attention_backend_choices([ATTENTION_BACKEND])
    register_attention_backend(ATTENTION_BACKEND)(_create_attention_backend)
    _hook_draft_backends()
    _hook_last_slots()


def create_decode_backend(
    model_runner: "ModelRunner", topk: int, speculative_num_steps: int
) -> "CPUMultiStepDraftBackend | None":
    """The draft's decode backend; None where no step needs a forward pass."""
    from sgl_frspec.cpu_engine.attention import CPUMultiStepDraftBackend

    if speculative_num_steps <= 1:
        return None
    return CPUMultiStepDraftBackend(model_runner, topk, speculative_num_steps)


def create_draft_extend_backend(model_runner: "ModelRunner") -> "CPUAttentionBackend":
    """The draft's extend backend."""
    return _create_attention_backend(model_runner)


def _create_attention_backend(model_runner: "ModelRunner") -> "CPUAttentionBackend":
    from sgl_frspec.cpu_engine.attention import CPUAttentionBackend

    return CPUAttentionBackend(model_runner)


def _hook_draft_backends() -> None:
    """SGLang's factory of draft backends takes only names it knows; let it take ours."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for method, hook in (
        ("create_decode_backend", _decode_hook),
        ("create_draft_extend_backend", _draft_extend_hook),
    ):
        HookRegistry.register(f"{_DRAFT_BACKEND_FACTORY}.{method}", hook, HookType.AROUND)


def _hook_last_slots() -> None:
    """With pages, SGLang looks up last slots by a Triton kernel for any backend it doesn't know."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(_LAST_SLOTS, _last_slots_hook, HookType.AROUND)


def _last_slots_hook(original: Any, *args: Any) -> Any:
    from sglang.srt.mem_cache.allocation import get_last_loc_torch

    return get_last_loc_torch(*args)


def _decode_hook(original: Any, factory: Any) -> Any:
    if not _wants_ours(factory):
        return original(factory)
    return create_decode_backend(
        factory.draft_model_runner, factory.topk, factory.speculative_num_steps
    )


def _draft_extend_hook(original: Any, factory: Any) -> Any:
    if not _wants_ours(factory):
        return original(factory)
    return create_draft_extend_backend(factory.draft_model_runner)


def _wants_ours(factory: Any) -> bool:
    from sglang.srt.runtime_context import attention_backends

    return ATTENTION_BACKEND in (factory.draft_attn_backend or attention_backends())
