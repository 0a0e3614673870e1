"""What :mod:`frspec_kernels.reduced_topk` ships, for compilation without a GPU."""

from frspec_kernels.compile_spec import CompileSpec
from frspec_kernels.reduced_topk_kernels import final_norm_kernel, slice_topk_kernel
from frspec_kernels.reduced_topk_launch import (
    NORM_WARPS,
    TABLE_VOCABS,
    LaunchConfig,
    launch_config,
    merge_chunk,
    merge_warps,
    next_power_of_2,
)
from frspec_kernels.reduced_topk_merge_kernels import merge_shards_kernel, merge_slices_kernel

SHIPPED_TYPES = (
    ("bf16", "bf16", 2),
    ("fp16", "fp16", 2),
    ("bf16", "fp8e4nv", 1),
    ("bf16", "i8", 1),
)
MERGED = ((128, 64), (512, 64), (1024, 128), (2048, 64))  # slices, head rows of a slice
OUTPUTS = {"probs_ptr": "*fp32:16", "token_ids_ptr": "*i64:16", "lse_ptr": "*fp32:16"}


def compile_specs() -> list[CompileSpec]:
    """The kernels in every shipped configuration, as SGLang calls them: dense rows, H by 128."""
    used = {
        (launch_config(rows, vocab, itemsize), hidden, head, rows): None
        for hidden, head, itemsize in SHIPPED_TYPES
        for rows in (16, 64)
        for vocab in TABLE_VOCABS
    }
    specs = [_slice_spec(*choice) for choice in used]
    specs += [_gathered(s) for s in specs if s.signature["hidden_ptr"] == "*bf16:16"]
    specs += [_merge_spec(k, parts, v) for k in (1, 10, 64) for parts, v in MERGED]
    specs += [_shards_spec(k, shards) for k in (10, 64) for shards in (2, 8)]
    return [*specs, *(_norm_spec(block) for block in (2048, 4096, 8192))]


def _slice_spec(config: LaunchConfig, hidden: str, head: str, block_b: int) -> CompileSpec:
    signature = {
        "hidden_ptr": f"*{hidden}:16",
        "head_ptr": f"*{head}:16",
        "token_ids_ptr": "*i64:16",
        "scores_ptr": "*fp32:16",
        "bests_ptr": "*i64:16",
        **dict.fromkeys(("B", "V", "head_rows"), "i32"),
        **dict.fromkeys(("H", "stride_hidden_row", "stride_head_row"), "i32:16"),
    }
    absent: dict[str, None] = {"row_ids_ptr": None, "temperature_ptr": None}
    if hidden != head:
        signature["head_scale_ptr"] = "*fp32:16"
    else:
        absent["head_scale_ptr"] = None
    constexprs = {
        "BLOCK_V": config.block_v, "BLOCK_B": block_b, "BLOCK_H": config.block_h,
        "EVEN_H": True, "USE_PDL": False,
    }  # fmt: skip
    return CompileSpec(
        slice_topk_kernel, signature, constexprs | absent, config.warps, config.stages
    )


def _gathered(spec: CompileSpec) -> CompileSpec:
    """The same with rows picked by id, and a temperature."""
    more = {"row_ids_ptr": "*i64:16", "temperature_ptr": "*fp32:16"}
    constexprs = {name: value for name, value in spec.constexprs.items() if name not in more}
    return spec._replace(signature={**spec.signature, **more}, constexprs=constexprs)


def _merge_spec(k: int, parts: int, block_v: int) -> CompileSpec:
    k_pad, warps = next_power_of_2(k), merge_warps(parts)
    block_v = block_v if k > 1 else 1
    signature = {"bests_ptr": "*i64:16", "vocab_ids_ptr": "*i64:16", **OUTPUTS}
    signature |= dict.fromkeys(("V", "parts", "rounds"), "i32")
    constexprs = {
        "merged_ptr": None, "K": k, "K_PAD": k_pad, "BLOCK_P": parts,
        "BLOCK_V": block_v, "BLOCK_C": merge_chunk(block_v, k_pad, warps),
        "LOG_PROBS": False, "USE_PDL": False,
    }  # fmt: skip
    if k > 1:
        signature["scores_ptr"] = "*fp32:16"
    else:
        constexprs["scores_ptr"] = None
    return CompileSpec(merge_slices_kernel, signature, constexprs, warps)


def _shards_spec(k: int, shards: int) -> CompileSpec:
    block_n = next_power_of_2(shards * k)
    constexprs = {
        "K": k, "K_PAD": next_power_of_2(k), "BLOCK_S": shards, "BLOCK_N": block_n,
        "LOG_PROBS": False, "USE_PDL": False,
    }  # fmt: skip
    signature = {"states_ptr": "*i64:16", **OUTPUTS, "shards": "i32", "rounds": "i32"}
    return CompileSpec(merge_shards_kernel, signature, constexprs, merge_warps(block_n))


def _norm_spec(block_h: int) -> CompileSpec:
    pointers = ("hidden_ptr", "residual_ptr", "weight_ptr", "normed_ptr")
    signature = {
        **dict.fromkeys(pointers, "*bf16:16"),
        **dict.fromkeys(("H", "stride_hidden_row", "stride_residual_row"), "i32:16"),
        "eps": "fp32",
    }
    constexprs = {"BLOCK_H": block_h, "USE_PDL": False}
    return CompileSpec(final_norm_kernel, signature, constexprs, NORM_WARPS)
