"""Launch configurations of the norms, and what they ship for cross-compilation."""

from typing import NamedTuple

import triton

from . import norm_kernels as kernels
from .compile_spec import CompileSpec

BLOCKS = tuple(2**power for power in range(5, 15))  # 32 to 16,384 elements: rows up to MAX_WIDTH
TYPES = ("bf16", "fp16", "fp32")


class LaunchConfig(NamedTuple):
    """One program a row: ``block`` elements, of which the first H count, on ``num_warps`` warps."""

    block: int
    num_warps: int


def launch_config(rows: int, width: int) -> LaunchConfig:
    """The configuration for ``rows`` programs of ``width`` elements."""
    block = max(triton.next_power_of_2(width), BLOCKS[0])
    return LaunchConfig(block, min(max(block // 512, 1), 16))


def _pointers(dtype: str, *names: str) -> dict[str, str]:
    return dict.fromkeys(names, f"*{dtype}:16")


def _integers(*names: str) -> dict[str, str]:
    return dict.fromkeys(names, "i32:16")


def _specs(config: LaunchConfig, dtype: str) -> list[CompileSpec]:
    """The three kernels in one configuration, as SGLang calls them: dense rows, one dtype."""
    constexprs = {"BLOCK": config.block, "USE_PDL": False}
    single = {**_integers("width"), "eps": "fp32"}
    norm = _pointers(dtype, "x_ptr", "weight_ptr", "out_ptr")
    add = _pointers(dtype, "x_ptr", "residual_ptr", "weight_ptr")
    dual = {"token_ids_ptr": "*i64:16"} | _pointers(
        dtype, "embedding_ptr", "hidden_ptr", "embed_weight_ptr", "hidden_weight_ptr", "out_ptr"
    )
    strides = _integers("stride_embedding", "stride_hidden", "stride_out", "vocab_size")
    return [
        CompileSpec(
            kernels.rms_norm_kernel,
            norm | _integers("stride_x", "stride_out") | single,
            constexprs | {"GEMMA": True},
            config.num_warps,
        ),
        CompileSpec(
            kernels.add_rms_norm_kernel,
            add | _integers("stride_x", "stride_residual") | single,
            constexprs | {"GEMMA": True},
            config.num_warps,
        ),
        CompileSpec(
            kernels.dual_norm_concat_kernel, dual | strides | single, constexprs, config.num_warps
        ),
    ]


def compile_specs() -> list[CompileSpec]:
    """Every configuration of the table: in bf16, and at 4,096 elements in the other types too."""
    specs = []
    for block in BLOCKS:
        configs = {launch_config(rows, block) for rows in (1, 64, 8192)}
        for dtype in TYPES if block == 4096 else TYPES[:1]:
            specs += [spec for config in sorted(configs) for spec in _specs(config, dtype)]
    return specs
