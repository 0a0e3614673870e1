"""Launch configurations of tree attention, and what they ship for cross-compilation.

The grid is fixed by batch, heads, the largest node count and the SM count; never by the contexts.
"""

from dataclasses import dataclass
from functools import lru_cache
from math import ceil
from typing import Any

import torch
import triton

from frspec_kernels.compile_spec import CompileSpec
from frspec_kernels.split_merge import merge_splits_kernel
from frspec_kernels.tree_attention_kernels import tree_attention_kernel


@dataclass(frozen=True)
class TreeAttentionConfig:
    """How one launch is cut."""

    block_m: int  # query rows (nodes x heads of one KV head) in a program
    block_n: int  # keys in a tile
    num_warps: int
    num_stages: int
    programs_per_sm: int  # slots that the splits of all requests share, per SM
    step: int = 1  # whole tiles that a program takes at once
    min_tiles: int = 1  # a split is not cut below this many steps
    prefetch: bool = False  # read a tile's page-table entries one tile ahead
    merge_block_s: int = 8  # parts that a merge program reads at once
    merge_block_r: int = 1  # rows of a merge program
    merge_warps: int = 1


MERGE_WARPS_PER_SM = 32
H200_SHARED = 227 << 10  # bytes of shared memory that a program may have
A100_SHARED = 163 << 10
AMD_SHARED = 64 << 10


def launch_config(
    rows: int,
    head_dim: int,
    batch: int = 1,
    shared_memory: int = H200_SHARED,
    *,
    converts: bool = False,
) -> TreeAttentionConfig:
    """Configuration for ``rows`` = nodes x (query heads / KV heads) of the largest request.

    Measured on an H200 at head dim 128 (docs/measurements.md, "Tree attention"). Two programs an
    SM hide each other's latencies, but leave twice the parts to merge: worth it for several
    requests, not for one. A merge in one warp needs no barriers; for one request it reads all parts
    at once, the 16 or 8 slots of 132 SMs with 8 KV heads. Four warps are better only where the
    merge mostly finds nothing split: many rows of several requests. Those take 128 keys at once,
    where three stages of them fit and a cache of another type than the queries' does not pass
    through registers (``converts``); for one request that is slower below 32,768 tokens. Wide
    heads, and GPUs with less shared memory, take what fits without spills; they were not timed.
    """
    small = shared_memory <= AMD_SHARED
    if head_dim > 128:
        shape = (64, 32, 8, 2) if small else (128, 64, 8, 2)
        return TreeAttentionConfig(*shape, programs_per_sm=1, prefetch=True)
    stages = 2 if small else 3
    if rows <= 64 and batch == 1:
        return TreeAttentionConfig(64, 64, 4, stages, 1, prefetch=True, merge_block_s=16)
    if rows <= 64:
        return TreeAttentionConfig(64, 64, 4, stages, 2, prefetch=True, merge_block_r=2)
    if batch == 1:
        return TreeAttentionConfig(128, 64, 8, stages, 1, prefetch=True)
    step = 2 if shared_memory >= H200_SHARED and not converts else 1
    merge = {"merge_block_s": 16, "merge_block_r": 2, "merge_warps": 4}
    return TreeAttentionConfig(128, 64, 8, stages, 1, step=step, prefetch=True, **merge)


@dataclass(frozen=True)
class LaunchShape:
    """Grid and workspace that a configuration needs for given shapes."""

    m_tiles: int
    num_slots: int
    grid: tuple[int, int, int]
    max_parts: int
    max_rows: int
    merge_programs: int

    @property
    def part_rows(self) -> int:
        """Rows of partial results: parts x KV heads x rows of a request."""
        return self.max_parts * self.grid[1] * self.max_rows

    @classmethod
    def of(
        cls, config: TreeAttentionConfig, *, batch: int, kv_heads: int, rows: int, sm_count: int
    ) -> "LaunchShape":
        """Shape for ``batch`` requests of at most ``rows`` query rows per KV head."""
        m_tiles = max(1, ceil(rows / config.block_m))
        slots = max(1, config.programs_per_sm * sm_count // (kv_heads * m_tiles))
        programs = slots if batch == 1 else slots + batch
        blocks = batch * kv_heads * ceil(rows / config.merge_block_r)
        return cls(
            m_tiles,
            slots,
            (m_tiles, kv_heads, programs),
            slots * 4 // 3 + 1,
            rows,
            min(blocks, MERGE_WARPS_PER_SM // config.merge_warps * sm_count),
        )


def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that a program of the device may have."""
    return _shared_memory(device.index) if device.type == "cuda" else H200_SHARED


@lru_cache
def _shared_memory(index: int | None) -> int:
    properties = torch.cuda.get_device_properties(index)
    return getattr(properties, "shared_memory_per_block_optin", AMD_SHARED)


def multiprocessors(device: torch.device) -> int:
    """SMs of the device; under the interpreter, enough to split."""
    return _multiprocessors(device.index) if device.type == "cuda" else 4


@lru_cache
def _multiprocessors(index: int | None) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count


GROUP_32_OVER_8 = 4  # query heads of a KV head: Llama-3-8B's
OPTIONS = {"HAS_SINKS": False, "STORE_LSE": False, "WINDOW_LEFT": -1, "BLOCK_B": 1}
PLAN = ("kv_indptr_ptr", "qo_indptr_ptr", "key_indptr_ptr")


def compile_specs() -> list[CompileSpec]:
    """Every configuration at every head dim; options and types at head dim 128."""
    shapes = [(rows, dim) for dim in (64, 96, 128, 256) for rows in (64, 240)]
    specs = [_split_spec(launch_config(*shape), shape[1]) for shape in shapes]
    for rows in (64, 240):
        config = launch_config(rows, 128)
        specs += [
            _split_spec(config, 128, in_cache=True, lengths=True, page_size=64),
            _split_spec(launch_config(rows, 128, converts=True), 128, "fp8e4nv", in_cache=True),
            _split_spec(config, 128, WINDOW_LEFT=4095, HAS_SINKS=True, STORE_LSE=True),
            _split_spec(config, 128, HAS_CAP=True, BLOCK_B=32),
        ]
    specs += [_split_spec(launch_config(*shape, 1, AMD_SHARED), shape[1]) for shape in shapes]
    specs.append(_split_spec(launch_config(240, 128, 8, A100_SHARED), 128, BLOCK_B=32))
    specs += [_merge_spec(launch_config(64, dim), dim) for dim in (64, 96, 128, 256)]
    for rows, batch in ((64, 8), (240, 1), (240, 8)):
        config = launch_config(rows, 128, batch)
        specs.append(_merge_spec(config, 128, BLOCK_B=1 if batch == 1 else 32))
    several = launch_config(240, 128, batch=8)
    specs += [
        _split_spec(several, 128, BLOCK_B=32),
        _split_spec(several, 128, BLOCK_B=32, HAS_CAP=True),
        _split_spec(several, 128, in_cache=True, page_size=64),
        _split_spec(several, 128, WINDOW_LEFT=4095, HAS_SINKS=True, BLOCK_B=32),
    ]
    config = launch_config(64, 128, batch=8)
    specs.append(_merge_spec(config, 128, BLOCK_B=32, HAS_SINKS=True, STORE_LSE=True))
    return specs


def _common_spec(config: TreeAttentionConfig, dim: int, options: dict[str, Any]) -> dict[str, Any]:
    return {
        "GROUP": GROUP_32_OVER_8,
        "DV": dim,
        "HAS_LENS": False,
        "USE_PDL": False,
        "BLOCK_N": config.block_n,
        "STEP": config.step,
        "BLOCK_DV": triton.next_power_of_2(dim),
        **OPTIONS,
        **options,
    }


def _spec(
    kernel: Any, pointers: dict[str, str], constexprs: dict[str, Any], warps: int, stages: int
) -> CompileSpec:
    """The rest of the kernel's arguments are floats (scales), strides, or pointers not given."""
    signature = {name: f"*{kind}:16" for name, kind in pointers.items()}
    for name in kernel.arg_names:
        if name in signature or name in constexprs:
            continue
        if name.endswith("_ptr"):
            constexprs = {**constexprs, name: None}
        elif name.startswith("stride") and name != "stride_mask":
            signature[name] = "i32:16"
        else:
            signature[name] = "fp32" if name.endswith(("scale", "cap")) else "i32"
    ordered = {name: signature[name] for name in kernel.arg_names if name in signature}
    return CompileSpec(kernel, ordered, constexprs, warps, stages)


def _split_spec(
    config: TreeAttentionConfig,
    dim: int,
    cache: str = "bf16",
    *,
    in_cache: bool = False,
    lengths: bool = False,
    page_size: int = 1,
    **options: Any,
) -> CompileSpec:
    pointers = dict.fromkeys(("q_ptr", "out_ptr"), "bf16")
    pointers |= dict.fromkeys(("k_cache_ptr", "v_cache_ptr"), cache)
    pointers |= dict.fromkeys(("k_tree_ptr", "v_tree_ptr"), cache if in_cache else "bf16")
    pointers |= dict.fromkeys((*PLAN, "kv_indices_ptr", "mask_ptr"), "i32")
    pointers |= dict.fromkeys(("part_out_ptr", "part_lse_ptr"), "fp32")
    optional = {
        "context_lens_ptr": (lengths, "i32"),
        "tree_slots_ptr": (in_cache, "i64"),
        "sinks_ptr": (options.get("HAS_SINKS"), "fp32"),
        "lse_ptr": (options.get("STORE_LSE"), "fp32"),
        "depths_ptr": ("WINDOW_LEFT" in options, "i32"),
        "key_depths_ptr": ("WINDOW_LEFT" in options, "i32"),
    }
    pointers |= {name: kind for name, (given, kind) in optional.items() if given}
    constexprs = {
        **_common_spec(config, dim, {"HAS_CAP": False, **options}),
        "HAS_LENS": lengths,
        "D": dim,
        "PAGE_SIZE": page_size,
        "TREE_IN_CACHE": in_cache,
        "PREFETCH": config.prefetch,
        "BLOCK_M": config.block_m,
        "BLOCK_D": triton.next_power_of_2(dim),
    }
    return _spec(tree_attention_kernel, pointers, constexprs, config.num_warps, config.num_stages)


def _merge_spec(config: TreeAttentionConfig, dim: int, **options: Any) -> CompileSpec:
    pointers = dict.fromkeys(PLAN, "i32") | {"out_ptr": "bf16"}
    pointers |= dict.fromkeys(("part_out_ptr", "part_lse_ptr"), "fp32")
    if options.get("HAS_SINKS"):
        pointers |= {"sinks_ptr": "fp32", "lse_ptr": "fp32"}
    constexprs = _common_spec(config, dim, options)
    constexprs |= {"KV_HEADS": 8, "BLOCK_S": config.merge_block_s, "BLOCK_R": config.merge_block_r}
    return _spec(merge_splits_kernel, pointers, constexprs, config.merge_warps, 3)
