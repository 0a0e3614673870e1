"""Which part of a cycle each kernel of an SGLang server belongs to.

A server's rounds run as CUDA graphs, so no range of the host tells their kernels apart, and matrix
products carry the names of their tilings. What a product computes follows from its neighbours:
between a norm and a rotary embedding it is the query, key and value projection, between an
activation and a norm the down projection, and so on. A forward pass begins at an embedding lookup;
one with a single MLP is the draft's, one with several the target's.
"""

import itertools
import re
from collections.abc import Iterator, Sequence

from bench.breakdown.parts import UNKNOWN, Key

GEMM, SPLIT_K, GATHER, GLUE = "GEMM", "split-k", "gather", "glue"
ACTIVATION, METADATA = "activation", "attention metadata"

# The first pattern found in a name decides. "draft head" is the fused one: product and selection.
_KINDS = tuple(
    (kind, re.compile(pattern, re.IGNORECASE))
    for kind, pattern in (
        ("copies", r"^mem(cpy|set)|memcpy32_post|copy_all_layer_kv|snapshot_kernel"),
        (SPLIT_K, r"splitKreduce|split_k_reduce"),
        (METADATA, r"kv_indices|kv_splits|cache_loc|prepare_varlen|position_kernel|pack_mask"),
        ("draft head", r"slice_topk|merge_(slices|shards)|reduced_(topk|head)"),
        ("norms", r"norm(?!al)"),
        (ACTIVATION, r"act_and_mul|silu|gelu"),
        (
            "attention",
            r"attention|attn|_fwd_(grouped_)?kernel|fmha|flash|merge_s(plits|tate)|rope|rotary"
            r"|store_?kv|set_kv_buffer|Batch(Prefill|Decode)|PagedParams|device_kernel.*Mainloop",
        ),
        (
            "acceptance",
            r"accept|argmax|VerifyTree|tree_speculative|fill_bonus|tally_kernel|softmax_parts"
            r"|narrow_bracket|collect_candidates|decide_children|race_kernel|finish_sampled",
        ),
        ("softmax", r"softmax"),
        ("tree", r"grow_tree|build_tree|tree_kernel|select_top_k|organize_draft"),
        ("top-k", r"topk|top_k|draw_children|bitonicSort|radixSort|radix_sort|scan_by_key"),
        (GEMM, r"nvjet|gemm|gemv|cutlass|xmma|cublas|splitK|wgmma|matmul"),
        (GATHER, r"indexSelect|vectorized_gather|embedding|gather_embed"),
        (
            GLUE,
            r"elementwise|CatArray|index_|scatter|gather|multi_tensor_apply|cub::|triton_poi"
            r"|triton_red|triton_per|reduce_kernel|assign_|fill_|req_to_token|distribution",
        ),
    )
)
# What tells the products around it apart.
_LANDMARKS = frozenset(
    ("norms", ACTIVATION, "attention", "embedding", "softmax", "top-k", "draft head", "acceptance")
)
_BEHIND_HEAD = frozenset(("softmax", "top-k", "acceptance", "draft head", "embedding", None))
_PART_OF = {ACTIVATION: "MLP", METADATA: "attention", "draft head": "LM head"}


def kind(name: str) -> str | None:
    """What a kernel does as far as its name tells; None if it is not known."""
    return next((kind for kind, pattern in _KINDS if pattern.search(name)), None)


def label(names: Sequence[str]) -> list[Key]:
    """Phase and part of each kernel.

    Args:
        names: of kernels, copies and fills in the order in which they ran.
    """
    kinds = [kind(name) for name in names]
    for place, found in enumerate(kinds):
        if found == GATHER:
            kinds[place] = "embedding" if _begins_pass(kinds, place) else GLUE
    parts = _parts(kinds)
    return list(zip(_phases(kinds, parts), parts, strict=True))


def _begins_pass(kinds: Sequence[str | None], place: int) -> bool:
    """A lookup is an embedding when a norm or a product follows, not other bookkeeping."""
    following = (k for k in kinds[place + 1 :] if k not in (GLUE, "copies", None))
    return next(following, None) in ("norms", GEMM)


def _parts(kinds: Sequence[str | None]) -> list[str]:
    parts: list[str | None] = [None] * len(kinds)
    for run, before, after in _gemm_runs(kinds):
        for place, part in zip(run, _products(len(run), before, after), strict=True):
            parts[place] = part
    current = "copies"
    for place, found in enumerate(kinds):
        if found == SPLIT_K:
            parts[place] = current
        elif found == GLUE:
            parts[place] = _glue(kinds, parts, place, current)
        elif parts[place] is None:
            parts[place] = UNKNOWN if found is None else _PART_OF.get(found, found)
        if found not in (GLUE, "copies", METADATA, None):
            current = parts[place] or UNKNOWN
    return [part or UNKNOWN for part in parts]


def _gemm_runs(
    kinds: Sequence[str | None],
) -> Iterator[tuple[list[int], str | None, str | None]]:
    """Products with no landmark between them, with the landmarks around them."""
    run: list[int] = []
    before: str | None = None
    for place, found in enumerate(kinds):
        if found == GEMM:
            run.append(place)
        elif found in _LANDMARKS or found == "tree":
            if run:
                yield run, before, found if found != "tree" else "top-k"
                run = []
            before = found
    if run:
        yield run, before, None


def _products(count: int, before: str | None, after: str | None) -> list[str]:
    """What ``count`` products between two landmarks compute."""
    if before == "attention":
        rest = ["MLP" if after == ACTIVATION else "LM head"] * (count - 1)
        return ["attention projections", *rest]
    if before == ACTIVATION:
        return ["MLP", *["LM head"] * (count - 1)]
    if after == ACTIVATION:
        return ["MLP"] * count
    if after == "attention":
        return ["fc"] * (count - 1) + ["attention projections"]
    if before == "embedding":
        return ["fc"] * count
    if before == "norms" and after == "norms":  # normed queries and keys
        return ["fc"] * (count - 1) + ["attention projections"]
    if before == "norms" and after in _BEHIND_HEAD:
        return ["LM head"] * count
    return [UNKNOWN] * count


def _glue(
    kinds: Sequence[str | None], parts: Sequence[str | None], place: int, current: str
) -> str:
    """Small kernels belong to what they prepare inside a pass, else to what came before."""
    for ahead in range(place + 1, len(kinds)):
        found = kinds[ahead]
        if found in (GLUE, "copies", SPLIT_K):
            continue
        if found == "attention":
            return "attention"
        if found == GEMM and current == "embedding":
            return parts[ahead] or UNKNOWN
        break
    # A sum of residuals follows a projection; behind heads comes bookkeeping.
    following = {"MLP": "norms", "LM head": "tree", "top-k": "tree", "softmax": "tree"}
    return following.get(current, current)


def _phases(kinds: Sequence[str | None], parts: Sequence[str]) -> list[str]:
    starts = [place for place, found in enumerate(kinds) if found == "embedding"]
    phases = ["between"] * len(kinds)
    for begin, end in itertools.pairwise([*starts, len(kinds)]):
        layers = kinds[begin:end].count(ACTIVATION)
        phases[begin:end] = ["draft" if layers <= 1 else "verify"] * (end - begin)
    for place, part in enumerate(parts):
        if part == "tree":
            phases[place] = "draft"
        elif part == "acceptance":
            phases[place] = "verify"
    return phases
