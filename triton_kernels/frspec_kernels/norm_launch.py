"""Launch configurations of the norms, and what they ship for cross-compilation."""

from typing import NamedTuple

import torch
import triton

from . import norm_kernels as kernels
from .compile_spec import CompileSpec

BLOCKS = tuple(2**power for power in range(5, 15))  # 32 to 16,384 elements: rows up to MAX_WIDTH
TYPES = ("bf16", "fp16", "fp32")


class LaunchConfig(NamedTuple):
    """One program a row: ``block`` elements, of which the first H count, on ``num_warps`` warps."""

    block: int
    num_warps: int


# Chosen on an H200 with `python -m bench tune --op norm` (µs of rms_norm / add_rms_norm, bf16):
# block   rows   warps: µs
#  2048     16   2: 1.51 / 1.50   4: 1.42 / 1.39   8: 1.38 / 1.42   16: 1.39 / 1.40
#  4096     16   4: 1.66 / 1.67   8: 1.56 / 1.56   16: 1.51 / 1.57   32: 1.58 / 1.61
#  4096     64   4: 1.83 / 2.05   8: 1.74 / 1.99   16: 1.80 / 2.09
#  4096   1024   2: 5.88 / 9.19   4: 5.74 / 9.15   8: 6.26 / 9.61   16: 6.18 / 9.64
#  4096   8192   2: 34.6 / 67.2   4: 34.4 / 67.3   8: 33.8 / 67.7   16: 37.2 / 68.1
#  8192     16   8: 1.89 / 2.09   16: 1.80 / 1.98   32: 1.88 / 2.05
# 16384     16   8: 2.59 / 3.37   16: 2.67 / 3.34   32: 2.33 / 2.90
ELEMENTS_A_WARP = 512
MAX_WARPS = 16 if torch.version.hip else 32  # 1,024 threads: warps have 64 or 32
MIDDLE = range(512, 4096)  # rows: too few to hide a sum across eight warps, enough to fill the GPU


def launch_config(rows: int, width: int) -> LaunchConfig:
    """The configuration for ``rows`` programs of ``width`` elements."""
    block = max(triton.next_power_of_2(width), BLOCKS[0])
    warps = min(max(block // ELEMENTS_A_WARP, 1), MAX_WARPS)
    return LaunchConfig(block, max(warps // 2, 1) if rows in MIDDLE else warps)


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
        configs = {launch_config(rows, block) for rows in (1, MIDDLE.start)}
        for dtype in TYPES if block == 4096 else TYPES[:1]:
            specs += [spec for config in sorted(configs) for spec in _specs(config, dtype)]
    return specs
