"""What sampling relies on in SGLang; part of the table in ``contract``."""

from sgl_frspec.contract_entry import Need, cls, fn, in_module, values

SAMPLING_NEEDS: tuple[Need, ...] = (
    *in_module(
        "sglang.srt.speculative.eagle_worker_common",
        fn(
            "eagle_sample",
            "replaced: acceptance of sampled batches",
            ("verify_input", "batch", "logits_output"),
        ),
        fn("run_eagle_verify", "must call what replaces it", None, (), ("eagle_sample",)),
    ),
    *in_module(
        "sglang.srt.sampling.sampling_batch_info",
        cls("SamplingBatchInfo", "read"),
        fn(
            "SamplingBatchInfo.from_schedule_batch",
            "replaced: gives every request a seed",
            ("cls", "batch", "vocab_size"),
        ),
        *values(
            "SamplingBatchInfo",
            "read: how requests sample",
            "acc_additive_penalties",
            "acc_scaling_penalties",
            "is_all_greedy",
            "logit_bias",
            "min_ps",
            "need_min_p_sampling",
            "need_top_k_sampling",
            "need_top_p_sampling",
            "sampling_seed",
            "temperatures",
            "top_ks",
            "top_ps",
        ),
    ),
    *in_module(
        "sglang.srt.sampling.penaltylib.repetition_penalty",
        fn(
            "apply_scaling_penalties",
            "called: penalties of a verification",
            ("logits", "scaling_penalties"),
        ),
    ),
    *in_module(
        "sglang.srt.layers.sampler",
        cls("Sampler", "one method replaced"),
        fn(
            "Sampler._sample_from_probs",
            "replaced: first tokens",
            ("self", "probs", "sampling_info", "positions", "simple_sampling_case"),
        ),
    ),
)
