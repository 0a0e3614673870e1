"""Synthetic traces of servers: the kernels of a round in their real order, with known times."""

LAYERS = 3
STEPS = 2

NORM = "void flashinfer::norm::FusedAddRMSNormKernel<8u, __nv_bfloat16>(...)"
GEMM = "nvjet_sm90_tst_{}_v_bz_TNT"
SPLIT_K = "void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16>(...)"
EMBED = "void at::native::(anonymous namespace)::indexSelectSmallIndex<c10::BFloat16, long>(...)"
CAT = "void at::native::(anonymous namespace)::CatArrayBatchedCopy_vectorized<...>(...)"
ROPE = "void (anonymous namespace)::fused_rope_kernel<true, 128l, true, __nv_bfloat16>(...)"
STORE = "void (anonymous namespace)::store_kvcache<2048l, 2048l, 4, true, long>(...)"
COPY = "void at::native::elementwise_kernel<128, 4, direct_copy_kernel_cuda>(...)"
ADD = "void at::native::vectorized_elementwise_kernel<8, CUDAFunctor_add<c10::BFloat16>>(...)"
ACT = "void (anonymous namespace)::act_and_mul_kernel<__nv_bfloat16>(...)"
SOFTMAX = "void (anonymous namespace)::cunn_SoftMaxForward<4, float, float, float>(...)"
TOPK = "void at::native::mbtopk::gatherTopK<float, unsigned int, 2>(...)"
GATHER = "void at::native::vectorized_gather_kernel<16, long>(...)"
INDICES = "create_flashinfer_kv_indices_triton"


def _layer(first: str | None, attention: list[str]) -> list[tuple[str, str]]:
    """Kernels of one layer with their parts; EAGLE's draft layer has no norm in front."""
    rows = [(first, "norms")] if first else []
    rows += [(GEMM.format("64x16"), "attention projections"), (ROPE, "attention")]
    rows += [(STORE, "attention"), (COPY, "attention")]
    rows += [(name, "attention") for name in attention]
    rows += [(GEMM.format("64x16_splitK"), "attention projections")]
    rows += [(SPLIT_K, "attention projections"), (NORM, "norms")]
    rows += [(GEMM.format("128x16"), "MLP"), (ACT, "MLP"), (GEMM.format("128x16_splitK"), "MLP")]
    return [*rows, (SPLIT_K, "MLP")]


def _draft_step(fused: bool) -> list[tuple[str, str]]:
    rows = [(EMBED, "embedding"), (CAT, "fc"), (GEMM.format("bias"), "fc"), (SPLIT_K, "fc")]
    rows += _layer(None, ["_fwd_grouped_kernel_stage1", "_fwd_kernel_stage2"])
    rows += [(ADD, "norms")]
    if fused:
        rows += [("slice_topk_kernel", "LM head"), ("merge_slices_kernel", "LM head")]
        return [*rows, ("grow_tree_kernel", "tree")]
    rows += [(GEMM.format("head"), "LM head"), (SOFTMAX, "softmax"), (TOPK, "top-k")]
    return [*rows, (COPY, "tree")]


def round_of(fused: bool) -> list[tuple[str, str, str]]:
    """Kernel, phase and part of each launch between two acceptances."""
    draft = [row for _ in range(STEPS) for row in _draft_step(fused)]
    draft += [("build_tree_kernel", "tree"), (INDICES, "attention")]
    verify = [(EMBED, "embedding")]
    verify += [row for _ in range(LAYERS) for row in _layer(NORM, ["tree_attention_kernel"])]
    verify += [(NORM, "norms"), (GEMM.format("head"), "LM head")]
    accept = "accept_greedy_kernel" if fused else "void VerifyTreeGreedy<int, long>(...)"
    verify += [("argmax_kernel", "acceptance"), (accept, "acceptance")]
    verify += [("copy_all_layer_kv_cache_tiled", "copies"), (GATHER, "copies")]
    verify += [("Memcpy DtoH (Device -> Pinned)", "copies"), (INDICES, "attention")]
    rows = [(name, "draft", part) for name, part in draft]
    return rows + [(name, "verify", part) for name, part in verify]


def trace(rounds: int, fused: bool, gap: float, extra: str = "") -> tuple[list[dict], dict]:
    """Events of ``rounds`` rounds and the true GPU microseconds of one, by (phase, part).

    Args:
        rounds: how many.
        fused: FRSPEC's kernels, or the stock chain.
        gap: idle time behind each kernel.
        extra: a kernel of 40 us behind each round's first.
    """
    rows = round_of(fused)
    if extra:
        rows.insert(1, (extra, "draft", "unattributed"))
    events, truth, now = [], {}, 1000.0
    for _ in range(rounds):
        for place, (name, phase, part) in enumerate(rows):
            us = 40.0 if name == extra else 1.0 + place % 7
            copy = name.startswith("Memcpy")
            category = "gpu_memcpy" if copy else "kernel"
            events.append({"cat": category, "name": name, "ts": now, "dur": us, "args": {}})
            truth[phase, part] = truth.get((phase, part), 0.0) + us / rounds
            now += us + gap
    return events, truth
