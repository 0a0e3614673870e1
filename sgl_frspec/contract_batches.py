"""What FRSPEC reads of SGLang's batches, results and runners; part of the table in ``contract``."""

from sgl_frspec.contract_entry import SELF, Need, cls, fn, in_module, values

BATCH_NEEDS: tuple[Need, ...] = (
    *in_module(
        "sglang.srt.managers.schedule_batch",
        cls("ScheduleBatch", "read: the requests of a round"),
        *values(
            "ScheduleBatch",
            "read: requests, lengths, and what rules out a captured round",
            "device",
            "forward_mode",
            "has_grammar",
            "is_extend_in_batch",
            "out_cache_loc",
            "req_pool_indices",
            "reqs",
            "return_hidden_states",
            "return_logprob",
            "sampling_info",
            "seq_lens",
            "seq_lens_sum",
            "spec_info",
        ),
    ),
    *in_module(
        "sglang.srt.managers.utils",
        cls("GenerationBatchResult", "constructed"),
        *values(
            "GenerationBatchResult",
            "read and given: what a round leaves",
            "accept_lens",
            "logits_output",
            "next_draft_input",
            "next_token_ids",
        ),
    ),
    *in_module(
        "sglang.srt.speculative.eagle_info",
        *values(
            "EagleDraftInput",
            "read and given: what a round starts from",
            "bonus_tokens",
            "hidden_states",
            "topk_index",
            "topk_p",
        ),
        *values("EagleDraftExtendInput", "read: the last accepted row", "num_accept_tokens"),
    ),
    *in_module(
        "sglang.srt.model_executor.forward_batch_info",
        *values("ForwardBatch", "read and set: tokens of a pass", "input_ids"),
        fn("ForwardBatch.mark_forward_metadata_ready", "called by a captured round", SELF),
    ),
    *in_module(
        "sglang.srt.model_executor.model_runner",
        *values(
            "ModelRunner",
            "read: memory, backends, algorithm",
            "attn_backend",
            "device",
            "graph_shared_output",
            "spec_algorithm",
        ),
        fn("ModelRunner.forward", "called: the draft's passes", ("self", "forward_batch")),
    ),
    *in_module(
        "sglang.srt.layers.quantization.unquant",
        cls("UnquantizedEmbeddingMethod", "base of the lookup by indexing"),
        fn("UnquantizedEmbeddingMethod.embedding", "overridden", ("self", "layer", "input_")),
    ),
    *in_module(
        "sglang.srt.layers.vocab_parallel_embedding",
        cls("VocabParallelEmbedding", "its lookup is replaced"),
        *values("VocabParallelEmbedding", "the lookup, replaced", "quant_method"),
    ),
    *in_module(
        "sglang.srt.model_executor.graph_shared_output",
        cls("GraphSharedOutput", "its buffers"),
        fn(
            "GraphSharedOutput.get_logits_buffer",
            "called: the target's logits in a captured round",
            ("self", "vocab_size", "rows"),
        ),
    ),
    *in_module(
        "sglang.srt.mem_cache.kv_cache_configurator",
        fn("get_req_to_token_extra_context_len", "replaced: the width of the table of slots"),
        fn(
            "KVCacheConfigurator._build_req_to_token_pool",
            "must call what replaces it",
            None,
            (),
            ("get_req_to_token_extra_context_len",),
        ),
    ),
    *in_module(
        "sglang.srt.mem_cache.allocation_sizing",
        fn("get_alloc_reserve_per_decode", "called: the width of the table of slots"),
    ),
)
