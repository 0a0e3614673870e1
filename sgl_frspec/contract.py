"""Every SGLang attribute that this package overrides, calls or reads, and how it must look.

SGLang promises no stable interface to what a speculative worker touches. This table says what is
relied on; it is checked against the source of the installed SGLang when the plugin loads, and by a
test against each supported release. Where they differ the plugin says so and registers nothing.
"""

import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from sgl_frspec.source_tree import Definition, SourceTree

SUPPORTED = "0.5.17 to 0.5.23"

# Fields of SGLang's arguments: one dataclass up to 0.5.17, assembled from namespaces later.
_FIELD_HOLDERS = (
    ("sglang.srt.server_args", "ServerArgs"),
    ("sglang.srt.arg_groups.fields.device", "Device"),
    ("sglang.srt.arg_groups.fields.disagg", "Disagg"),
    ("sglang.srt.arg_groups.fields.exec_", "ExecKernel"),
    ("sglang.srt.arg_groups.fields.lora", "Lora"),
    ("sglang.srt.arg_groups.fields.model", "Model"),
    ("sglang.srt.arg_groups.fields.parallel", "Parallel"),
    ("sglang.srt.arg_groups.fields.schedule", "Schedule"),
    ("sglang.srt.arg_groups.fields.serving", "Serving"),
    ("sglang.srt.arg_groups.fields.spec", "Spec"),
)
_SERVER_FIELDS = (
    "attention_backend",
    "decode_attention_backend",
    "device",
    "disable_overlap_schedule",
    "disaggregation_mode",
    "enable_dp_attention",
    "enable_lora",
    "enable_mixed_chunk",
    "enable_multi_layer_eagle",
    "json_model_override_args",
    "max_running_requests",
    "model_path",
    "page_size",
    "pp_size",
    "prefill_attention_backend",
    "revision",
    "speculative_adaptive",
    "speculative_draft_model_path",
    "speculative_draft_model_revision",
    "speculative_eagle_topk",
    "speculative_num_draft_tokens",
    "speculative_num_steps",
    "speculative_token_map",
    "speculative_use_rejection_sampling",
    "tokenizer_path",
    "tp_size",
    "trust_remote_code",
)

Kind = Literal["class", "function", "value", "field"]


@dataclass(frozen=True)
class Need:
    """One attribute.

    Attributes:
        module, name: where it is; ``name`` may be dotted.
        kind: what it must be. A ``field`` is one of SGLang's server arguments.
        use: what this package does with it.
        required: a function's parameters without a default, in order; None to leave them open.
        keywords: parameters that are passed by name.
        mentions: names that the function's body must still refer to.
        cpu_only: needed by the CPU engine alone, which supports the newest release only.
    """

    module: str
    name: str
    kind: Kind
    use: str
    required: tuple[str, ...] | None = None
    keywords: tuple[str, ...] = ()
    mentions: tuple[str, ...] = ()
    cpu_only: bool = False

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


_SPEC_INFO = "sglang.srt.speculative.spec_info"
_REGISTRY = "sglang.srt.speculative.spec_registry"
_WORKER = "sglang.srt.speculative.eagle_worker_v2"
_LLAMA = "sglang.srt.models.llama"
_BACKEND = "sglang.srt.layers.attention.base_attn_backend"

NEEDS: tuple[Need, ...] = (
    Need(
        _SPEC_INFO,
        "SpeculativeAlgorithm.register",
        "function",
        "registers FRSPEC",
        required=("cls", "name"),
        keywords=("supports_overlap", "spec_class"),
    ),
    Need(_SPEC_INFO, "SpeculativeAlgorithm.need_topk", "function", "called on ours", ("self",)),
    Need(
        _SPEC_INFO,
        "SpeculativeAlgorithm.carries_draft_hidden_states",
        "function",
        "called on ours",
        ("self",),
    ),
    Need(
        _SPEC_INFO,
        "SpeculativeAlgorithm.create_future_map",
        "function",
        "called on ours",
        ("self", "device", "req_to_token_pool"),
        mentions=("FutureMap",),
    ),
    Need(_REGISTRY, "CustomSpecAlgo", "class", "base of the algorithm"),
    Need(_REGISTRY, "CustomSpecAlgo.is_eagle", "function", "overridden", ("self",)),
    Need(_REGISTRY, "CustomSpecAlgo.supports_grammar_overlap", "function", "overridden", ("self",)),
    Need(
        _REGISTRY,
        "CustomSpecAlgo.handle_server_args",
        "function",
        "overridden: defaults and checks before weights load",
        ("self", "server_args"),
    ),
    Need(_WORKER, "EAGLEWorkerV2", "class", "base of the worker"),
    Need(
        _WORKER,
        "EAGLEWorkerV2.__init__",
        "function",
        "constructs our draft worker in place of EagleDraftWorker",
        mentions=("EagleDraftWorker",),
    ),
    Need(_WORKER, "EagleDraftWorker", "class", "base of the draft worker"),
    Need(
        _WORKER,
        "EagleDraftWorker.__init__",
        "function",
        "loads the draft; the head is reduced after it",
        mentions=("TpModelWorker",),
    ),
    Need(_WORKER, "EagleDraftWorker.init_token_map", "function", "overridden", ("self",)),
    Need(_WORKER, "EagleDraftWorker.init_lm_head", "function", "overridden", ("self",)),
    Need(
        _WORKER,
        "EagleDraftWorker.draft_forward",
        "function",
        "maps draft ids by hot_token_id",
        mentions=("self", "select_top_k_tokens"),
    ),
    Need(_WORKER, "EagleDraftWorker.hot_token_id", "value", "set: draft id -> token id"),
    Need(_WORKER, "EagleDraftWorker.target_worker", "value", "read: the target's model"),
    Need(_WORKER, "EagleDraftWorker.draft_runner", "value", "read: the draft's model"),
    Need(_WORKER, "EagleDraftWorker.server_args", "value", "read: where the map is"),
    Need(
        "sglang.srt.managers.tp_worker",
        "TpModelWorker.model_runner",
        "value",
        "read: the target's model",
    ),
    Need(
        "sglang.srt.model_executor.model_runner", "ModelRunner.model_config", "value", "vocabulary"
    ),
    Need(_LLAMA, "LlamaForCausalLM.get_embed_and_head", "function", "called", ("self",)),
    Need(
        _LLAMA,
        "LlamaForCausalLM.set_embed_and_head",
        "function",
        "called",
        ("self", "embed", "head"),
    ),
    Need("sglang.srt.models.llama_eagle", "LlamaForCausalLMEagle.lm_head", "value", "untied"),
    Need(
        "sglang.srt.server_args",
        "ServerArgs.add_cli_args",
        "function",
        "hooked: adds our flags",
        ("parser",),
    ),
    Need(
        "sglang.srt.utils.hf_transformers.config",
        "get_config",
        "function",
        "called: sizes and special ids",
        ("model", "trust_remote_code"),
        keywords=("revision", "model_override_args"),
    ),
    Need("sglang.srt.plugins.hook_registry", "HookRegistry", "class", "registers hooks"),
    Need(
        "sglang.srt.plugins.hook_registry",
        "HookRegistry.register",
        "function",
        "registers hooks",
        ("cls", "target", "hook"),
        keywords=("hook_type",),
    ),
    Need("sglang.srt.plugins.hook_registry", "HookType.AFTER", "value", "kind of a hook"),
    Need("sglang.srt.plugins.hook_registry", "HookType.AROUND", "value", "kind of a hook"),
    *(
        Need("sglang.srt.server_args", name, "field", "read or defaulted")
        for name in _SERVER_FIELDS
    ),
    # The CPU engine.
    Need(
        "sglang.srt.arg_groups.choices",
        "add_attention_backend_choices",
        "value",
        "adds frspec_cpu",
        cpu_only=True,
    ),
    Need(
        "sglang.srt.layers.attention.attention_registry",
        "register_attention_backend",
        "function",
        "registers frspec_cpu",
        ("name",),
        cpu_only=True,
    ),
    Need(
        "sglang.srt.speculative.draft_utils",
        "DraftBackendFactory.create_decode_backend",
        "function",
        "hooked",
        ("self",),
        cpu_only=True,
    ),
    Need(
        "sglang.srt.speculative.draft_utils",
        "DraftBackendFactory.create_draft_extend_backend",
        "function",
        "hooked",
        ("self",),
        cpu_only=True,
    ),
    Need(
        "sglang.srt.runtime_context",
        "attention_backends",
        "function",
        "called",
        (),
        cpu_only=True,
    ),
    Need(_BACKEND, "AttentionBackend", "class", "base of frspec_cpu", cpu_only=True),
    Need(
        _BACKEND,
        "AttentionBackend.init_forward_metadata",
        "function",
        "overridden",
        ("self", "forward_batch"),
        cpu_only=True,
    ),
    Need("sglang.srt.layers.radix_attention", "AttentionType", "class", "read", cpu_only=True),
    Need(
        "sglang.srt.layers.radix_attention", "RadixAttention", "class", "its sizes", cpu_only=True
    ),
    Need("sglang.srt.mem_cache.memory_pool", "KVWriteLoc", "class", "called", cpu_only=True),
    Need(
        "sglang.srt.model_executor.forward_batch_info",
        "ForwardBatch",
        "class",
        "read",
        cpu_only=True,
    ),
    Need("sglang.srt.model_executor.model_runner", "ModelRunner", "class", "read"),
)


@dataclass(frozen=True)
class Drift:
    """A need that an SGLang does not meet."""

    need: Need
    problem: str

    def __str__(self) -> str:
        return f"{self.need} {self.problem}"


def check_contract(tree: SourceTree, *, cpu_engine: bool) -> list[Drift]:
    """What in ``tree`` differs from the table; empty when all is as expected.

    Args:
        tree: the folder that holds the package ``sglang``.
        cpu_engine: check also what only the CPU engine needs.
    """
    wanted = (need for need in NEEDS if cpu_engine or not need.cpu_only)
    return [Drift(need, problem) for need in wanted if (problem := _problem(tree, need))]


def installed_tree() -> SourceTree | None:
    """The source of the SGLang that this Python would import, or None without one."""
    spec = importlib.util.find_spec("sglang")
    if spec is None or not spec.submodule_search_locations:
        return None
    return SourceTree(Path(spec.submodule_search_locations[0]).parent)


def _problem(tree: SourceTree, need: Need) -> str | None:
    if need.kind == "field":
        found = any(tree.find(m, f"{holder}.{need.name}") for m, holder in _FIELD_HOLDERS)
        return None if found else "is no server argument"
    definition = tree.find(need.module, need.name)
    if definition is None:
        return "is missing"
    if definition.kind != need.kind:
        return f"is a {definition.kind}, not a {need.kind}"
    return next(_differences(definition, need), None)


def _differences(definition: Definition, need: Need) -> Iterator[str]:
    names = {parameter.name for parameter in definition.parameters}
    takes_any = any(parameter.kind == "**" for parameter in definition.parameters)
    required = tuple(p.name for p in definition.parameters if p.required)
    if need.required is not None and required != need.required:
        yield f"takes {definition.signature}, not ({', '.join(need.required)})"
    missing = [] if takes_any else [name for name in need.keywords if name not in names]
    if missing:
        yield f"takes {definition.signature}, without {', '.join(missing)}"
    silent = [name for name in need.mentions if name not in definition.mentions]
    if silent:
        yield f"no longer uses {', '.join(silent)}"
