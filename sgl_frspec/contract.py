"""Every SGLang attribute that this package overrides, calls or reads, and how it must look.

SGLang promises no stable interface to what a speculative worker touches. This table says what is
relied on. :mod:`sgl_frspec.contract_check` compares it with the source of the installed SGLang when
the plugin loads; tests compare it with each supported release, and with this package's own code.
"""

from sgl_frspec.contract_attention import ATTENTION_NEEDS
from sgl_frspec.contract_batches import BATCH_NEEDS
from sgl_frspec.contract_entry import SELF as _SELF
from sgl_frspec.contract_entry import Need
from sgl_frspec.contract_entry import cls as _cls
from sgl_frspec.contract_entry import fields as _fields
from sgl_frspec.contract_entry import fn as _fn
from sgl_frspec.contract_entry import in_module as _in
from sgl_frspec.contract_entry import values as _values
from sgl_frspec.contract_round import ROUND_NEEDS
from sgl_frspec.contract_sampling import SAMPLING_NEEDS

SUPPORTED = ("0.5.17", "0.5.23")

# Server arguments: fields of one dataclass up to 0.5.19, assembled from namespaces later.
FIELD_HOLDERS = (
    ("sglang.srt.server_args", "ServerArgs"),
    ("sglang.srt.arg_groups.fields.device", "Device"),
    ("sglang.srt.arg_groups.fields.exec_", "ExecDeterministic"),
    ("sglang.srt.arg_groups.fields.exec_", "ExecFeatures"),
    ("sglang.srt.arg_groups.fields.disagg", "Disagg"),
    ("sglang.srt.arg_groups.fields.exec_", "ExecGraph"),
    ("sglang.srt.arg_groups.fields.exec_", "ExecKernel"),
    ("sglang.srt.arg_groups.fields.exec_", "ExecMoe"),
    ("sglang.srt.arg_groups.fields.exec_", "ExecOverlap"),
    ("sglang.srt.arg_groups.fields.lora", "Lora"),
    ("sglang.srt.arg_groups.fields.model", "Model"),
    ("sglang.srt.arg_groups.fields.observability", "Observability"),
    ("sglang.srt.arg_groups.fields.parallel", "Parallel"),
    ("sglang.srt.arg_groups.fields.schedule", "Schedule"),
    ("sglang.srt.arg_groups.fields.serving", "Serving"),
    ("sglang.srt.arg_groups.fields.spec", "Spec"),
)

_LAST_SLOT = ("req_to_token", "req_pool_indices_tensor", "prefix_lens_tensor")

NEEDS: tuple[Need, ...] = (
    *BATCH_NEEDS,
    *ROUND_NEEDS,
    *SAMPLING_NEEDS,
    # The algorithm.
    *_in(
        "sglang.srt.speculative.spec_info",
        _fn(
            "SpeculativeAlgorithm.register",
            "registers FRSPEC",
            ("cls", "name"),
            ("supports_overlap", "spec_class"),
        ),
        _fn("SpeculativeAlgorithm.need_topk", "called on ours", _SELF),
        _fn("SpeculativeAlgorithm.carries_draft_hidden_states", "called on ours", _SELF),
        _fn(
            "SpeculativeAlgorithm.create_future_map",
            "called on ours",
            ("self", "device", "req_to_token_pool"),
            mentions=("FutureMap",),
        ),
    ),
    *_in(
        "sglang.srt.speculative.spec_registry",
        _cls("CustomSpecAlgo", "base of the algorithm"),
        _fn("CustomSpecAlgo.is_eagle", "overridden", _SELF),
        _fn("CustomSpecAlgo.supports_grammar_overlap", "overridden", _SELF),
        _fn(
            "CustomSpecAlgo.handle_server_args",
            "overridden: defaults and checks before weights load",
            ("self", "server_args"),
        ),
    ),
    # The worker.
    *_in(
        "sglang.srt.speculative.eagle_worker_v2",
        _cls("EAGLEWorkerV2", "base of the worker"),
        _fn(
            "EAGLEWorkerV2.__init__",
            "constructs our draft worker in place of EagleDraftWorker",
            mentions=("EagleDraftWorker",),
        ),
        _cls("EagleDraftWorker", "base of the draft worker; the name is bound to ours meanwhile"),
        _fn(
            "EagleDraftWorker.__init__",
            "loads the draft; its head is reduced right after",
            mentions=("TpModelWorker",),
        ),
        _fn("EagleDraftWorker.init_token_map", "overridden", _SELF),
        _fn("EagleDraftWorker.init_lm_head", "overridden", _SELF),
        _fn(
            "EagleDraftWorker.draft_forward",
            "maps draft ids by hot_token_id",
            mentions=("select_top_k_tokens",),
        ),
        *_values("EagleDraftWorker", "set: draft id -> token id", "hot_token_id"),
        *_values(
            "EagleDraftWorker",
            "models and arguments",
            "target_worker",
            "draft_runner",
            "server_args",
        ),
    ),
    *_in("sglang.srt.managers.tp_worker", *_values("TpModelWorker", "the target", "model_runner")),
    *_in(
        "sglang.srt.model_executor.model_runner",
        _cls("ModelRunner", "read"),
        *_values("ModelRunner", "the models, their configuration", "model", "model_config"),
    ),
    *_in(
        "sglang.srt.configs.model_config",
        *_values("ModelConfig", "size, and what is refused", "vocab_size", "hf_config"),
        _fn("ModelConfig.from_server_args", "called: what is refused", ("server_args",)),
    ),
    *_in(
        "sglang.srt.configs.hybrid_arch",
        _fn("mambaish_config", "called: what is refused", ("model_config",)),
    ),
    *_in(
        "sglang.srt.models.llama",
        _fn("LlamaForCausalLM.get_embed_and_head", "called", _SELF),
        _fn("LlamaForCausalLM.set_embed_and_head", "called", ("self", "embed", "head")),
    ),
    *_in(
        "sglang.srt.models.llama_eagle",
        *_values("LlamaForCausalLMEagle", "replaced when tied", "lm_head", "model"),
        *_values("LlamaModel", "whether the head is tied to it", "embed_tokens"),
    ),
    # Arguments, configuration, plugins.
    *_in(
        "sglang.srt.arg_groups.overrides",
        _fn("resolving_view", "called: arguments with SGLang's decisions", ("server_args",)),
        optional=True,
    ),
    *_in(
        "sglang.srt.server_args",
        _fn("ServerArgs.add_cli_args", "hooked: adds our flags", ("parser",)),
        *_fields(
            "defaulted",
            "disable_overlap_schedule",
            "enable_mixed_chunk",
            "max_running_requests",
            "speculative_eagle_topk",
            "speculative_num_draft_tokens",
            "speculative_num_steps",
            "speculative_use_rejection_sampling",
        ),
        *_fields(
            "read: what is served and how",
            "attention_backend",
            "dcp_size",
            "decode_attention_backend",
            "decode_log_interval",
            "device",
            "enable_deterministic_inference",
            "enable_metrics",
            "enable_return_routed_experts",
            "enable_torch_compile",
            "expert_distribution_recorder_mode",
            "json_model_override_args",
            "kv_cache_dtype",
            "max_total_tokens",
            "model_path",
            "page_size",
            "prefill_attention_backend",
            "revision",
            "served_model_name",
            "speculative_algorithm",
            "speculative_draft_attention_backend",
            "speculative_draft_model_path",
            "speculative_draft_model_revision",
            "speculative_token_map",
            "tokenizer_path",
            "trust_remote_code",
        ),
        *_fields(
            "refused",
            "disaggregation_mode",
            "enable_custom_logit_processor",
            "enable_dp_attention",
            "enable_lora",
            "enable_multi_layer_eagle",
            "enable_pdmux",
            "enable_two_batch_overlap",
            "lora_paths",
            "pp_size",
            "speculative_accept_threshold_acc",
            "speculative_accept_threshold_single",
            "tp_size",
        ),
    ),
    *_in(
        "sglang.srt.server_args",
        *_fields("refused", "attn_dp_size", "startup_weight_load_mode"),
        optional=True,
    ),
    *_in(
        "sglang.srt.utils.hf_transformers.config",
        _fn(
            "get_config",
            "called: sizes and special ids",
            ("model", "trust_remote_code"),
            ("revision", "model_override_args"),
        ),
    ),
    *_in(
        "sglang.srt.plugins.hook_registry",
        _cls("HookRegistry", "registers hooks"),
        _fn("HookRegistry.register", "registers hooks", ("cls", "target", "hook"), ("hook_type",)),
        _cls("HookType", "kinds of hooks"),
        *_values("HookType", "kinds of hooks", "AFTER", "AROUND"),
    ),
    # The CPU engine.
    *_in(
        "sglang.srt.arg_groups.choices",
        Need("add_attention_backend_choices", "value", "adds frspec_cpu"),
        cpu_only=True,
    ),
    *_in(
        "sglang.srt.layers.attention.base_attn_backend",
        _cls("AttentionBackend", "base of frspec_cpu"),
        _fn("AttentionBackend.init_forward_metadata", "overridden", ("self", "forward_batch")),
        _fn(
            "AttentionBackend.forward_extend",
            "overridden",
            ("self", "q", "k", "v", "layer", "forward_batch"),
            ("save_kv_cache",),
        ),
        _fn(
            "AttentionBackend.forward_decode",
            "overridden",
            ("self", "q", "k", "v", "layer", "forward_batch"),
            ("save_kv_cache",),
        ),
        _fn("AttentionBackend.support_triton", "overridden", _SELF),
        cpu_only=True,
    ),
    *_in(
        "sglang.srt.mem_cache.allocation",
        _fn("get_last_loc", "hooked", _LAST_SLOT),
        _fn("get_last_loc_torch", "called in its place", _LAST_SLOT),
        cpu_only=True,
    ),
    *_in(
        "sglang.srt.model_executor.forward_batch_info",
        *_values(
            "ForwardBatch",
            "which tokens attend to which slots",
            "extend_prefix_lens",
            "extend_seq_lens",
        ),
        cpu_only=True,
    ),
    *_in(
        "sglang.srt.model_executor.model_runner",
        *_values(
            "ModelRunner",
            "pools and sizes",
            "page_size",
            "use_mla_backend",
        ),
        cpu_only=True,
    ),
    # The attention backend.
    *ATTENTION_NEEDS,
)
