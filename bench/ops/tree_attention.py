"""Verification: the nodes of a draft tree over a paged context and the tree's own keys.

``torch`` gathers the keys and calls ``scaled_dot_product_attention``; ``sglang_triton`` is SGLang's
extend kernel, ``flashinfer`` its fa2 paged prefill with a custom mask, ``fa3_cascade`` what SGLang
runs on Hopper by default: the context, each node's path, and a merge of the two.
"""

from itertools import product

from bench.op import Case, OpSpec, Provider, Tuning
from bench.ops import _attention_providers as others
from bench.ops._attention_inputs import (
    check,
    flops,
    least_bytes,
    reference,
    tree_inputs,
)
from frspec_kernels.tree_attention_launch import TreeAttentionConfig


def sized(
    batch: int, context: int, nodes: int, dtype: str = "bf16", kind: str = "uniform", page: int = 1
) -> Case:
    """A case; ``kind`` says whether the requests' contexts are equal."""
    where = {"page": page} if page > 1 else {}
    return Case(batch=batch, context=context, nodes=nodes, **where, dtype=dtype, kind=kind)


CASES = [
    *(sized(1, context, nodes) for context in (1024, 8192, 32_768) for nodes in (16, 60)),
    sized(1, 131_072, 60),
    *(sized(8, 4096, nodes) for nodes in (16, 60)),
    sized(32, 4096, 16),
    sized(8, 4096, 16, kind="ragged"),
    sized(1, 8192, 60, page=64),
    *(sized(8, 4096, nodes, "fp8") for nodes in (16, 60)),
]
SMALL_CASES = [
    sized(2, 70, 7, "fp16"),
    sized(3, 40, 5, "fp16", kind="ragged"),
    sized(2, 70, 7, "fp16", page=16),
    sized(2, 70, 7, "fp8"),
]


def _configs(case: Case) -> list[TreeAttentionConfig]:
    """Shapes that compile without spills on sm_90; programs an SM that fit its shared memory."""
    shapes = [
        (64, 32, 4, 4, 2, 1), (64, 64, 4, 2, 2, 1), (64, 64, 4, 3, 1, 1), (64, 64, 4, 3, 2, 1),
        (64, 64, 4, 2, 1, 2), (64, 64, 8, 2, 1, 2),
    ]  # fmt: skip
    if case["nodes"] > 16:
        shapes += [
            (128, 32, 8, 4, 1, 1), (128, 64, 8, 3, 1, 1), (128, 64, 8, 2, 1, 2),
            (128, 64, 8, 3, 1, 2), (128, 128, 8, 3, 1, 1),
            (128, 32, 4, 2, 2, 1), (128, 32, 4, 3, 2, 1),
        ]  # fmt: skip
    return [
        TreeAttentionConfig(m, n, warps, stages, per_sm, step, min_tiles, prefetch)
        for m, n, warps, stages, per_sm, step in shapes
        for min_tiles, prefetch in product((1, 4), (False, True))
    ]


OPS = (
    OpSpec(
        name="tree_attention",
        cases=CASES,
        small_cases=SMALL_CASES,
        make_inputs=tree_inputs,
        reference=reference,
        check=check,
        providers={
            "ours": Provider(others.ours),
            "torch": Provider(others.torch_sdpa, others.no_torch),
            "sglang_triton": Provider(others.sglang_extend, others.no_sglang_extend),
            "flashinfer": Provider(others.flashinfer_prefill, others.no_flashinfer),
            "fa3_cascade": Provider(others.fa3_cascade, others.no_fa3),
        },
        baseline="sglang_triton",
        bytes=least_bytes,
        flops=flops,
        axes=("context", "nodes"),
        tuning=Tuning(_configs, others.ours),
    ),
)
