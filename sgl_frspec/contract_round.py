"""What a round of drafting and verifying relies on in SGLang; part of the table in ``contract``."""

from sgl_frspec.contract_entry import SELF, Need, cls, fn, in_module, values

_WORKER = "sglang.srt.speculative.eagle_worker_v2"
_EXTEND_GRAPHS = "sglang.srt.speculative.eagle_draft_extend_cuda_graph_runner"

ROUND_NEEDS: tuple[Need, ...] = (
    *in_module(
        _WORKER,
        fn("EagleDraftWorker._capture_cuda_graphs", "overridden", SELF),
        fn("EagleDraftWorker.draft", "overridden", ("self", "batch")),
        fn(
            "EagleDraftWorker._draft_extend_for_prefill",
            "overridden: takes the head's proposals",
            ("self", "batch", "target_hidden_states", "next_token_ids"),
            mentions=("EagleDraftInput",),
        ),
        fn(
            "EagleDraftWorker._draft_extend_for_decode",
            "overridden",
            ("self", "batch", "batch_result"),
            mentions=("prepare_for_draft_extend", "EagleDraftExtendInput"),
        ),
        *values(
            "EagleDraftWorker",
            "read: the tree, the pools, backends and graphs",
            "cuda_graph_runner",
            "cuda_graph_runner_for_draft_extend",
            "draft_attn_backend",
            "req_to_token_pool",
            "speculative_num_draft_tokens",
            "speculative_num_steps",
            "topk",
        ),
        fn(
            "EAGLEWorkerV2.verify",
            "overridden for greedy batches",
            ("self", "batch"),
            mentions=("run_eagle_verify",),
        ),
        fn("EAGLEWorkerV2.init_cuda_graphs", "overridden: captures whole rounds", SELF),
        fn(
            "EAGLEWorkerV2.forward_batch_generation",
            "overridden for greedy batches",
            ("self", "batch"),
            ("on_publish",),
            mentions=("on_publish",),
        ),
        *values(
            "EAGLEWorkerV2",
            "read",
            "_draft_worker",
            "req_to_token_pool",
            "target_worker",
            "token_to_kv_pool_allocator",
        ),
    ),
    # When the scheduler may change the table of slots, by release.
    *in_module(
        _WORKER,
        *values("EAGLEWorkerV2", "whose event it waits for", "war_fastpath_runner"),
        optional=True,
    ),
    *in_module(
        "sglang.srt.speculative.base_spec_worker",
        *values("BaseSpecWorker", "whose event it waits for", "last_shared_read_runner"),
        optional=True,
    ),
    *in_module(
        "sglang.srt.model_executor.model_runner",
        *values(
            "ModelRunner",
            "set: the table has been read",
            "shared_read_done_event",
            "war_fastpath_read_done_event",
        ),
        optional=True,
    ),
    *in_module(
        "sglang.srt.speculative.eagle_worker_common",
        fn(
            "prepare_for_draft",
            "called: slots and batch of the draft steps",
            (
                "draft_input",
                "req_to_token_pool",
                "batch",
                "cuda_graph_runner",
                "draft_model_runner",
                "topk",
                "num_steps",
            ),
        ),
        fn(
            "prepare_for_draft_extend",
            "called: batch of the draft's pass over accepted tokens",
            (
                "draft_extend_input",
                "batch",
                "predict",
                "num_draft_tokens",
                "draft_model_runner",
                "cuda_graph_runner",
                "return_hidden_states_before_norm",
            ),
        ),
    ),
    *in_module(
        "sglang.srt.speculative.eagle_utils",
        fn(
            "eagle_prepare_for_verify",
            "called: slots and batch of the target's pass",
            ("verify_input", "req_to_token_pool", "batch", "target_worker"),
        ),
        fn(
            "get_draft_recurrent_hidden_state_spec",
            "called: states that a round leaves",
            ("model_runner",),
        ),
        fn("default_tree_mask_mode", "called: layout of the stock mask", ()),
        *values("TreeMaskMode", "layout of the stock mask", "FULL_MASK"),
        fn(
            "organize_draft_results",
            "called for --frspec-stock tree",
            ("score_list", "token_list", "parents_list", "num_draft_token"),
        ),
        fn(
            "per_step_draft_out_cache_loc",
            "called: slots of each step",
            ("out_cache_loc", "batch_size", "topk", "num_steps"),
        ),
    ),
    *in_module(
        "sglang.srt.speculative.spec_utils",
        Need("SIMULATE_ACC_LEN", "value", "read: simulated acceptance stays SGLang's"),
        fn(
            "select_top_k_tokens",
            "called for --frspec-stock tree",
            ("i", "topk_p", "topk_index", "hidden_states", "scores", "topk"),
        ),
    ),
    *in_module(
        "sglang.srt.speculative.eagle_info",
        cls("EagleDraftExtendInput", "constructed"),
        cls("EagleDraftInput", "constructed"),
        cls("EagleVerifyInput", "base of the input of a verification"),
    ),
    *in_module(
        _EXTEND_GRAPHS,
        cls("EAGLEDraftExtendCudaGraphRunner", "called"),
        fn("EAGLEDraftExtendCudaGraphRunner.execute", "called"),
    ),
    *in_module(
        "sglang.srt.model_executor.forward_context",
        cls("ForwardContext", "constructed: attention backend of a step"),
        fn("forward_context", "entered", ("ctx",)),
    ),
    *in_module(
        "sglang.srt.model_executor.forward_batch_info",
        cls("ForwardMode", "of the batches of a captured round"),
        *values("ForwardMode", "phases", "DECODE", "DRAFT_EXTEND_V2", "TARGET_VERIFY"),
        cls("CaptureHiddenMode", "of the batches of a captured round"),
        *values("CaptureHiddenMode", "which states are kept", "FULL", "LAST"),
    ),
    *in_module(
        "sglang.srt.model_executor.runner_utils.pool",
        fn(
            "get_or_create_global_graph_memory_pool", "called: memory of graphs", ("device_module",)
        ),
    ),
    *in_module(
        "sglang.srt.model_executor.runner",
        fn("model_capture_mode", "entered while rounds are captured", ()),
        fn("get_batch_sizes_to_capture", "called: memory of the head", ("model_runner",)),
    ),
    *in_module(
        "sglang.srt.layers.layernorm",
        cls("Gemma3RMSNorm", "whose instances run on our kernel where there are heads"),
        *values("Gemma3RMSNorm", "read by our kernel", "eps", "weight"),
        cls("RMSNorm", "whose instances run on our kernel"),
        *values(
            "RMSNorm",
            "read: whether it is a plain one",
            "cast_x_before_out_mul",
            "fp32_residual",
            "has_weight",
            "hidden_size",
            "override_orig_dtype",
            "variance_epsilon",
            "variance_size_override",
            "weight",
        ),
    ),
    *in_module(
        "sglang.srt.layers.logits_processor",
        cls("LogitsProcessor", "its conversion is left out of captured rounds"),
        fn(
            "LogitsProcessor._copy_logits_to_buffer",
            "replaced while rounds are captured",
            ("self", "logits", "logits_metadata"),
        ),
        *values("LogitsProcessor", "read", "final_logit_softcapping", "vocab_size"),
        cls("LogitsProcessorOutput", "constructed by the head"),
    ),
    *in_module(
        "sglang.srt.utils.common",
        fn("fast_topk", "called for --frspec-stock head", ("values", "topk", "dim")),
    ),
)
