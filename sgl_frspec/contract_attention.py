"""The contract table's part for the attention backends: on GPUs, and in the CPU engine."""

from sgl_frspec.contract_entry import SELF, Need, cls, fn, in_module, values

_RUN = ("self", "q", "k", "v", "layer", "forward_batch")
_BATCH = ("self", "forward_batch")
_GRAPH_STATE = ("self", "max_bs", "max_num_tokens")
_STEPS_INIT = ("self", "model_runner", "topk", "speculative_num_steps")
_TRITON = "TritonAttnBackend"
_STEPS = "TritonMultiStepDraftBackend"

ATTENTION_NEEDS: tuple[Need, ...] = (
    # How a backend becomes known, and the default.
    *in_module(
        "sglang.srt.layers.attention.attention_registry",
        fn("register_attention_backend", "registers frspec and frspec_cpu", ("name",)),
    ),
    *in_module(
        "sglang.srt.server_args",
        cls("ServerArgs", "whose default is hooked in older releases"),
        Need("ATTENTION_BACKEND_CHOICES", "value", "frspec is added"),
    ),
    *in_module(
        "sglang.srt.server_args",
        Need("ServerArgs._get_default_attn_backend", "function", "hooked: frspec by default"),
        Need("ServerArgs.get_attention_backends", "function", "called: which were chosen"),
        optional=True,
    ),
    *in_module(
        "sglang.srt.arg_groups.model_override_base",
        fn(
            "get_default_attn_backend",
            "hooked: frspec by default",
            ("server_args", "use_mla_backend", "model_config"),
        ),
        optional=True,
    ),
    *in_module(
        "sglang.srt.runtime_context",
        fn("attention_backends", "called: which were chosen", ()),
        optional=True,
    ),
    *in_module(
        "sglang.srt.runtime_context",
        fn("get_spec", "called: speculative options", ()),
    ),
    *in_module(
        "sglang.srt.speculative.draft_utils",
        fn("DraftBackendFactory.create_decode_backend", "hooked", SELF),
        fn("DraftBackendFactory.create_draft_extend_backend", "hooked", SELF),
        *values(
            "DraftBackendFactory",
            "read by the hooks",
            "draft_attn_backend",
            "draft_model_runner",
            "speculative_num_steps",
            "topk",
        ),
    ),
    # SGLang's Triton backend, on which ours builds.
    *in_module(
        "sglang.srt.layers.attention.triton_backend",
        cls(_TRITON, "base of frspec"),
        fn(f"{_TRITON}.__init__", "called", ("self", "model_runner")),
        fn(f"{_TRITON}.forward_extend", "overridden", _RUN, ("save_kv_cache",)),
        fn(f"{_TRITON}.forward_decode", "overridden", _RUN, ("save_kv_cache",)),
        fn(f"{_TRITON}.init_cuda_graph_state", "overridden", _GRAPH_STATE),
        fn(f"{_TRITON}.init_forward_metadata", "overridden", _BATCH),
        fn(f"{_TRITON}.init_forward_metadata_in_graph", "overridden", _BATCH),
        fn(f"{_TRITON}.init_forward_metadata_out_graph", "overridden", _BATCH, ("in_capture",)),
        fn(
            f"{_TRITON}.update_verify_buffers_to_fill_after_draft",
            "overridden",
            ("self", "spec_info", "cuda_graph_bs"),
        ),
        fn(
            f"{_TRITON}._set_kv_buffer",
            "called: writes keys and values",
            ("self", "forward_batch", "layer", "loc_info", "k", "v"),
        ),
        *values(_TRITON, "set: where SGLang's tree builder writes", "_verify_mask"),
        *values(
            _TRITON,
            "pools, sizes, and what is refused",
            "dcp_size",
            "device",
            "enable_deterministic",
            "forward_metadata",
            "is_draft_runner",
            "num_draft_tokens",
            "req_to_token",
            "req_to_token_pool",
            "sliding_window_size",
            "token_to_kv_pool",
            "use_mla",
        ),
        *values(
            "ForwardMetadata",
            "lists of slots, for caches whose slots are translated",
            "kv_indices",
            "kv_indptr",
            "swa_out_cache_loc",
            "window_kv_indices",
            "window_kv_indptr",
        ),
        cls(_STEPS, "base of the draft's steps"),
        fn(
            f"{_STEPS}.__init__",
            "called",
            ("self", "model_runner", "topk", "speculative_num_steps"),
        ),
        fn(f"{_STEPS}.init_cuda_graph_state", "overridden", _GRAPH_STATE),
        fn(f"{_STEPS}.init_forward_metadata", "overridden", _BATCH),
        fn(f"{_STEPS}.init_forward_metadata_in_graph", "overridden", _BATCH),
        fn(f"{_STEPS}.init_forward_metadata_out_graph", "overridden", _BATCH, ("in_capture",)),
        *values(_STEPS, "set: ours, one a step", "attn_backends"),
        *values(_STEPS, "sizes", "device", "kv_indptr", "speculative_num_steps", "topk"),
    ),
    *in_module(
        "sglang.srt.layers.attention.verify_mask",
        cls("VerifyMask", "made: where SGLang's tree builder writes"),
        *values("VerifyMask", "set", "buffer", "max_bs", "mode"),
    ),
    *in_module(
        "sglang.srt.speculative.eagle_utils",
        cls("TreeMaskMode", "read"),
        *values("TreeMaskMode", "bytes over the tree's nodes alone", "QLEN_ONLY"),
    ),
    *in_module(
        "sglang.srt.speculative.eagle_info",
        *values("EagleVerifyInput", "the tree's mask", "custom_mask"),
    ),
    # Layers, pools and batches.
    *in_module(
        "sglang.srt.layers.radix_attention",
        cls("AttentionType", "read"),
        *values("AttentionType", "refused", "ENCODER_ONLY"),
        cls("RadixAttention", "read"),
        *values(
            "RadixAttention",
            "shapes, scales, and what is refused",
            "attn_type",
            "is_cross_attention",
            "k_scale",
            "k_scale_float",
            "layer_id",
            "logit_cap",
            "logit_capping_method",
            "qk_head_dim",
            "scaling",
            "sliding_window_size",
            "tp_k_head_num",
            "tp_q_head_num",
            "tp_v_head_num",
            "v_head_dim",
            "v_scale",
            "v_scale_float",
            "xai_temperature_len",
        ),
    ),
    *in_module(
        "sglang.srt.mem_cache.memory_pool",
        cls("KVWriteLoc", "called"),
        cls("MHATokenToKVPool", "whose slots ours takes as they are"),
        fn("MHATokenToKVPool.get_key_buffer", "called", ("self", "layer_id")),
        fn("MHATokenToKVPool.get_value_buffer", "called", ("self", "layer_id")),
        fn("MHATokenToKVPool.get_kv_size_bytes", "called: what a token takes", ("self",)),
        fn(
            "MHATokenToKVPool._move_kv_cache_impl",
            "splits its copies where it is told to",
            ("self", "tgt_loc", "src_loc"),
            mentions=("copy_all_layer_kv_cache_func",),
        ),
        *values("MHATokenToKVPool", "most slots of a copy, lowered", "_kv_copy_config"),
    ),
    *in_module(
        "sglang.srt.model_executor.forward_batch_info",
        cls("ForwardBatch", "read"),
        *values(
            "ForwardBatch",
            "which tokens attend to which slots",
            "batch_size",
            "extend_seq_lens_cpu",
            "forward_mode",
            "out_cache_loc",
            "positions",
            "req_pool_indices",
            "seq_lens",
            "spec_info",
        ),
    ),
    *in_module(
        "sglang.srt.model_executor.model_runner",
        *values(
            "ModelRunner",
            "pools and windows",
            "req_to_token_pool",
            "sliding_window_size",
            "token_to_kv_pool",
        ),
    ),
)
