"""Launch configurations of the sampling kernels, and what they ship for cross-compilation."""

from typing import Any, NamedTuple

from triton import next_power_of_2

from .compile_spec import CompileSpec
from .sampling_accept_kernels import decide_children_kernel, finish_sampled_kernel, race_kernel
from .sampling_bracket_kernels import collect_candidates_kernel, narrow_bracket_kernel
from .sampling_filter_kernels import softmax_parts_kernel
from .sampling_proposal_kernels import draw_children_kernel
from .tree_launch import block_of

# How a row is split depends on the vocabulary alone: a request's sums, and so its outcome, are the
# same in every batch.
SLICE = 4096
LEAST_SLICE = 128
GROUPS = 32  # maxima kept of a slice
# Work on every row at once while the logits are fewer than this; else level by level of the tree,
# on the rows that acceptance visits.
ALL_ROWS_LIMIT = 10 << 20
# Where truncation ends is looked for in LEVELS passes over a row, each among EDGES scores.
LEVELS = 2
EDGES = 16
NARROW_BLOCK = 512
COLLECT_BLOCK = 1024
CANDIDATES_BLOCK = 256
# A list of candidates longer than this is shortened on the way to its pivot.
SHRINK_FROM = 8192
# Of so many candidates each is compared with all.
FEW = 256
SLICE_WARPS = 8
NARROW_WARPS = 4
DECIDE_WARPS = 8


class Sizes(NamedTuple):
    """Sizes that every launch of one acceptance shares."""

    nodes: int
    max_path: int
    vocab: int
    slice: int
    parts: int
    by_row: bool
    slots: int
    listed: int
    block_n: int
    left: int


def sizes_of(batch: int, nodes: int, max_path: int, vocab: int, listed: int) -> Sizes:
    """``listed`` is the length of the draft's lists, 0 without lists."""
    size = min(max(next_power_of_2(vocab), LEAST_SLICE), SLICE)
    by_row = batch * nodes * vocab <= ALL_ROWS_LIMIT
    block = max(block_of(nodes), block_of(listed) if listed else 0)
    return Sizes(
        nodes, max_path, vocab, size, -(-vocab // size), by_row, batch * nodes if by_row else batch,
        listed, block, 2 * block if listed else block,
    )  # fmt: skip


def parts_constexprs(sizes: Sizes, truncates: bool) -> dict[str, Any]:
    """Of the softmax."""
    return {
        "N": sizes.nodes, "P": sizes.parts, "SLICE": sizes.slice, "GROUPS": GROUPS,
        "TRUNCATES": truncates,
    }  # fmt: skip


def narrow_constexprs(sizes: Sizes, level: int) -> dict[str, Any]:
    """Of a level of the search for where truncation ends."""
    return {
        "LEVEL": level, "N": sizes.nodes, "P": sizes.parts,
        "BLOCK_P": next_power_of_2(sizes.parts), "SLICE": sizes.slice, "GROUPS": GROUPS,
        "BLOCK_G": next_power_of_2(sizes.parts * GROUPS), "EDGES": EDGES,
        "BLOCK": min(NARROW_BLOCK, sizes.slice),
    }  # fmt: skip


def collect_constexprs(sizes: Sizes) -> dict[str, Any]:
    """Of the candidates."""
    return {
        "LEVELS": LEVELS, "N": sizes.nodes, "P": sizes.parts,
        "BLOCK_P": next_power_of_2(sizes.parts), "SLICE": sizes.slice, "GROUPS": GROUPS,
        "EDGES": EDGES, "FEW": FEW, "BLOCK": min(COLLECT_BLOCK, sizes.slice),
    }  # fmt: skip


def decide_constexprs(sizes: Sizes, fixed: int, truncates: bool) -> dict[str, Any]:
    """Of the decisions at a node."""
    return {
        "N": sizes.nodes, "C": sizes.listed, "FIXED": fixed, "P": sizes.parts,
        "BLOCK_N": sizes.block_n, "BLOCK_C": sizes.left - sizes.block_n,
        "BLOCK_P": next_power_of_2(sizes.parts), "BLOCK": CANDIDATES_BLOCK,
        "LEVELS": LEVELS, "ID_BITS": max((sizes.vocab - 1).bit_length(), 1),
        "SHRINK_FROM": SHRINK_FROM, "FEW": FEW, "TRUNCATES": truncates,
    }  # fmt: skip


def race_constexprs(sizes: Sizes) -> dict[str, Any]:
    """Of the final draw."""
    return {
        "N": sizes.nodes, "D": sizes.max_path, "P": sizes.parts, "SLICE": sizes.slice,
        "LEFT": sizes.left, "BLOCK_N": sizes.block_n, "BLOCK_P": next_power_of_2(sizes.parts),
        "BY_ROW": sizes.by_row,
    }  # fmt: skip


def finish_constexprs(sizes: Sizes) -> dict[str, Any]:
    """Of the outcome."""
    return {
        "N": sizes.nodes, "D": sizes.max_path, "P": sizes.parts, "BLOCK_N": sizes.block_n,
        "BLOCK_D": block_of(sizes.max_path), "BLOCK_P": next_power_of_2(sizes.parts),
        "BY_ROW": sizes.by_row,
    }  # fmt: skip


def compile_specs() -> list[CompileSpec]:
    """All rows at once and level by level, with and without lists and truncation."""
    at_once, by_level = sizes_of(1, 60, 7, 128_256, 64), sizes_of(32, 60, 7, 128_256, 64)
    plain = sizes_of(32, 60, 7, 128_256, 0)
    specs = [_parts_spec(at_once, dtype, True) for dtype in ("fp32", "bf16", "fp16")]
    specs += [_parts_spec(by_level, "fp32", False)]
    for sizes in (at_once, by_level):
        specs += [_narrow_spec(sizes, level) for level in range(LEVELS)]
        specs += [_collect_spec(sizes), _race_spec(sizes), _finish_spec(sizes)]
        specs += [_decide_spec(sizes, truncates) for truncates in (False, True)]
    return [*specs, _decide_spec(plain, True), _race_spec(plain), _draw_spec()]


def _pointers(dtype: str, *names: str) -> dict[str, str]:
    return dict.fromkeys((f"{name}_ptr" for name in names), f"*{dtype}:16")


def _slots(sizes: Sizes) -> tuple[dict[str, str], dict[str, Any]]:
    """Type of ``current``, or its absence."""
    if sizes.by_row:
        return {}, {"current_ptr": None, "USE_PDL": False}
    return _pointers("i32", "current"), {"USE_PDL": False}


_LOGITS = {"V": "i32:16", "stride_logits": "i32:16"}
_PARAMETERS = _pointers("fp32", "temperatures", "top_ps", "min_ps") | _pointers("i32", "top_ks")


def _parts_spec(sizes: Sizes, dtype: str, truncates: bool) -> CompileSpec:
    current, fixed = _slots(sizes)
    signature = current | _pointers(dtype, "logits") | _pointers("fp32", "temperatures", "sums")
    signature |= _pointers("i64", "best_keys") | _pointers("i32", "group_orders") | _LOGITS
    constexprs = parts_constexprs(sizes, truncates) | fixed
    return CompileSpec(softmax_parts_kernel, signature, constexprs, SLICE_WARPS)


_BRACKETS = _pointers("i32", "brackets", "edges", "counts") | _pointers("fp32", "edge_masses")


def _narrow_spec(sizes: Sizes, level: int) -> CompileSpec:
    current, fixed = _slots(sizes)
    signature = current | _PARAMETERS | _BRACKETS | _pointers("fp32", "logits", "sums")
    signature |= _pointers("i64", "best_keys") | _pointers("i32", "group_orders") | _LOGITS
    constexprs = narrow_constexprs(sizes, level) | fixed
    return CompileSpec(narrow_bracket_kernel, signature, constexprs, NARROW_WARPS)


def _collect_spec(sizes: Sizes) -> CompileSpec:
    current, fixed = _slots(sizes)
    signature = current | _PARAMETERS | _BRACKETS | _pointers("fp32", "logits", "sums")
    signature |= _pointers("i64", "best_keys", "masses_above", "candidates") | _LOGITS
    signature |= _pointers("i32", "group_orders")
    return CompileSpec(
        collect_candidates_kernel, signature, collect_constexprs(sizes) | fixed, SLICE_WARPS
    )


def _decide_spec(sizes: Sizes, truncates: bool) -> CompileSpec:
    current, fixed = _slots(sizes)
    signature = current | _PARAMETERS | _pointers("fp32", "logits", "sums", "slopes")
    signature |= _pointers("fp32", "left_weights")
    signature |= _pointers("i64", "tokens", "seq_lens", "seeds", "best_keys", "left_ids")
    signature |= _pointers("i64", "candidates", "pivots", "masses_above")
    signature |= _pointers("i32", "parents", "counts", "next", "brackets")
    lists = _pointers("i8", "drawn") | _pointers("i32", "list_rows")
    lists |= _pointers("i64", "list_ids") | _pointers("fp32", "list_q")
    signature |= {"threshold_single": "fp32", "threshold_acc": "fp32", "R": "i32"} | _LOGITS
    if sizes.listed:
        signature |= lists
    else:
        fixed |= dict.fromkeys(lists)
    constexprs = decide_constexprs(sizes, 9 if sizes.listed else 0, truncates) | fixed
    return CompileSpec(decide_children_kernel, signature, constexprs, DECIDE_WARPS)


def _race_spec(sizes: Sizes) -> CompileSpec:
    signature = _pointers("fp32", "logits", "slopes", "left_weights") | _LOGITS
    signature |= _pointers("i64", "seq_lens", "seeds", "best_keys", "pivots", "left_ids")
    signature |= _pointers("i64", "race_keys") | _pointers("i32", "next")
    return CompileSpec(
        race_kernel, signature, race_constexprs(sizes) | {"USE_PDL": False}, SLICE_WARPS
    )


def _finish_spec(sizes: Sizes) -> CompileSpec:
    signature = _pointers("i64", "tokens", "seq_lens", "slots", "best_keys", "race_keys")
    signature |= _pointers("i64", "path_tokens", "bonus_tokens", "new_seq_lens")
    signature |= _pointers("i64", "source_slots", "target_slots")
    signature |= _pointers("i32", "next", "accept_index", "accept_lens", "predicts")
    constexprs = finish_constexprs(sizes) | {"USE_PDL": False}
    return CompileSpec(finish_sampled_kernel, signature, constexprs, 1)


def _draw_spec() -> CompileSpec:
    signature = _pointers("fp32", "probs", "temperatures", "scores", "q")
    signature |= _pointers("i64", "token_ids", "seq_lens", "seeds", "children")
    constexprs = {"ROWS": 10, "C": 64, "K": 10, "FIXED": 9, "BLOCK_C": 64, "USE_PDL": False}
    return CompileSpec(draw_children_kernel, signature | {"depth": "i32"}, constexprs, 1)
