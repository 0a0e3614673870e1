"""Launch configurations of the tree kernels, and what they ship for cross-compilation."""

from typing import NamedTuple

from triton import next_power_of_2

from .compile_spec import CompileSpec
from .tree_accept_kernels import accept_greedy_kernel, argmax_kernel
from .tree_args import TreeShape
from .tree_kernels import build_tree_kernel, grow_tree_kernel

WARP = 32
# 60 rows of 128,256 bf16 on an H200: 7.9 µs; blocks of 8,192 9.5, 2,048 7.8, four warps 8.2.
ARGMAX_BLOCK = 4096
ARGMAX_WARPS = 8
ARGMAX_MAX_PARTS = 32  # of a row: the acceptance reads a key of each
BLOCK_H = 2048

# What is compiled without a GPU: every launch of the first shape, the main ones of the others.
USUAL = TreeShape(top_k=10, steps=6, nodes=60)
OTHERS = (
    TreeShape(top_k=1, steps=3, nodes=4),
    TreeShape(top_k=4, steps=3, nodes=16),
    TreeShape(top_k=16, steps=6, nodes=200),
)


class Slices(NamedTuple):
    """How many programs share a row of logits, and how many logits each reads."""

    parts: int
    size: int


def block_of(length: int) -> int:
    """Lanes for ``length`` elements; a warp at least."""
    return max(next_power_of_2(length), WARP)


def grow_warps(block: int, copies_hidden: bool) -> int:
    """Few warps sort fastest: no exchange through shared memory. Copying rows wants more."""
    return min(max(block // 32, 4), 8) if copies_hidden else min(max(block // 256, 1), 8)


def build_warps(block_c: int) -> int:
    """For 512 candidates on an H200: 4.3 µs with 8 warps, 5.4 with 4, 4.8 with 16."""
    return min(max(block_c // 64, 2), 16)


def argmax_slices(vocab_size: int) -> Slices:
    """The split of a row; by its length only, so a CUDA graph keeps it."""
    blocks = -(-vocab_size // ARGMAX_BLOCK)
    size = -(-blocks // min(blocks, ARGMAX_MAX_PARTS)) * ARGMAX_BLOCK
    return Slices(-(-vocab_size // size), size)


def grow_constexprs(shape: TreeShape, step: int) -> dict[str, int | bool]:
    """Compile-time sizes of one growth step."""
    block = block_of(shape.top_k if step == 0 else shape.top_k**2)
    return {
        "K": shape.top_k, "C": shape.candidates, "PARENTS": shape.parents, "FIRST": step == 0,
        "LAST": step == shape.steps - 1, "BLOCK": block, "BLOCK_H": BLOCK_H,
    }  # fmt: skip


def build_constexprs(shape: TreeShape) -> dict[str, int]:
    """Compile-time sizes of the build."""
    block_c, block_n = block_of(shape.candidates), block_of(shape.nodes)
    return {
        "K": shape.top_k, "STEPS": shape.steps, "C": shape.candidates, "PARENTS": shape.parents,
        "N": shape.nodes, "W": shape.words, "BLOCK_C": block_c, "BLOCK_N": block_n,
        "BLOCK_K": min(block_c, block_n), "BLOCK_PARENTS": block_of(shape.parents),
        "BLOCK_W": next_power_of_2(shape.words),
    }  # fmt: skip


def accept_constexprs(nodes: int, max_path: int, parts: int) -> dict[str, int]:
    """Compile-time sizes of the acceptance; ``parts`` is 0 when the target's ids are given."""
    return {
        "N": nodes, "D": max_path, "P": parts, "BLOCK_N": block_of(nodes),
        "BLOCK_D": block_of(max_path), "BLOCK_P": next_power_of_2(max(parts, 1)),
    }  # fmt: skip


def compile_specs() -> list[CompileSpec]:
    """Growth, build and acceptance of the shapes above, the argmax in every type of logits."""
    specs = [_grow_spec(USUAL, s, copies) for s in (0, 1, 5) for copies in (False, True)]
    specs += [_build_spec(USUAL, kind) for kind in (0, 1, 2)]
    specs += [_accept_spec(USUAL, parts) for parts in (0, 1, 16)]
    for shape in OTHERS:
        specs += [_grow_spec(shape, 1, True), _build_spec(shape, 0), _accept_spec(shape, 0)]
    return specs + [_argmax_spec(dtype) for dtype in ("fp32", "bf16", "fp16")]


def _pointers(dtype: str, *names: str) -> dict[str, str]:
    return dict.fromkeys(names, f"*{dtype}:16")


def _grow_spec(shape: TreeShape, step: int, copies_hidden: bool) -> CompileSpec:
    sizes = grow_constexprs(shape, step)
    signature = _pointers("fp32", "probs_ptr", "scores_ptr") | _pointers(
        "i64", "tokens_ptr", "candidate_tokens_ptr", "parents_ptr"
    )
    signature |= dict.fromkeys(("step", "stride_probs", "stride_tokens"), "i32")
    signature |= dict.fromkeys(("H", "stride_hidden", "stride_beam_hidden"), "i32:16")
    absent: dict[str, None] = {}
    beams, hidden = ("beam_tokens_ptr", "beam_rows_ptr"), ("hidden_ptr", "beam_hidden_ptr")
    if sizes["LAST"]:
        absent |= dict.fromkeys(beams)
    else:
        signature |= _pointers("i64", *beams)
    if sizes["LAST"] or not copies_hidden:
        absent |= dict.fromkeys(hidden)
    else:
        signature |= _pointers("bf16", *hidden)
    warps = grow_warps(sizes["BLOCK"], copies_hidden and not sizes["LAST"])
    return CompileSpec(grow_tree_kernel, signature, sizes | absent | {"USE_PDL": False}, warps)


def _build_spec(shape: TreeShape, mask_kind: int) -> CompileSpec:
    long = (
        "candidate_tokens_ptr", "candidate_parents_ptr", "root_tokens_ptr", "seq_lens_ptr",
        "tokens_ptr", "selected_ptr", "positions_ptr", "retrieve_index_ptr", "next_token_ptr",
        "next_sibling_ptr",
    )  # fmt: skip
    signature = _pointers("fp32", "scores_ptr") | _pointers("i64", *long)
    signature |= _pointers("i32", "parents_ptr", "depths_ptr", "mask_ptr")
    constexprs: dict[str, int | None] = {
        **build_constexprs(shape), "MASK_KIND": mask_kind, "TIES_BY_PLACE": False,
        "USE_PDL": False,
    }  # fmt: skip
    if mask_kind:
        signature |= _pointers("u8", "byte_mask_ptr")
    else:
        constexprs["byte_mask_ptr"] = None
    warps = build_warps(constexprs["BLOCK_C"] or 0)
    return CompileSpec(build_tree_kernel, signature, constexprs, warps)


def _accept_spec(shape: TreeShape, parts: int) -> CompileSpec:
    long = (
        "tokens_ptr", "target_ptr", "seq_lens_ptr", "slots_ptr", "path_tokens_ptr",
        "bonus_tokens_ptr", "new_seq_lens_ptr", "source_slots_ptr", "target_slots_ptr",
    )  # fmt: skip
    signature = _pointers("i64", *long) | _pointers(
        "i32", "parents_ptr", "accept_index_ptr", "accept_lens_ptr", "predicts_ptr"
    )
    constexprs = accept_constexprs(shape.nodes, shape.steps + 1, parts) | {"USE_PDL": False}
    return CompileSpec(
        accept_greedy_kernel, signature, constexprs, accept_warps(constexprs["BLOCK_N"])
    )


def accept_warps(block_n: int) -> int:
    """One node a lane."""
    return min(block_n // WARP, 8)


def _argmax_spec(dtype: str) -> CompileSpec:
    slices = argmax_slices(128_256)
    signature = _pointers(dtype, "logits_ptr") | _pointers("i64", "keys_ptr")
    signature |= {"V": "i32:16", "stride_logits": "i32:16"}
    constexprs = {
        "P": slices.parts, "SLICE": slices.size, "BLOCK": ARGMAX_BLOCK, "USE_PDL": False,
    }  # fmt: skip
    return CompileSpec(argmax_kernel, signature, constexprs, ARGMAX_WARPS)
