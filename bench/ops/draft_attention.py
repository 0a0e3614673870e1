"""Draft decoding: one query a branch, the branches of a request share the read of their context.

``sglang_triton`` is SGLang's decode kernel on a list of slots for each branch, as its draft steps
call it; ``fa3_cascade`` shares the context between the branches, too.
"""

from itertools import product

from bench.op import Case, OpSpec, Provider, Tuning
from bench.ops import _attention_providers as others
from bench.ops._attention_inputs import (
    check,
    draft_inputs,
    flops,
    least_bytes,
    reference,
)
from bench.providers import needs
from frspec_kernels.tree_attention_launch import TreeAttentionConfig


def sized(batch: int, context: int, branches: int, dtype: str = "bf16") -> Case:
    """A case with equal contexts."""
    return Case(batch=batch, context=context, branches=branches, dtype=dtype, kind="uniform")


CASES = [
    *(sized(1, context, 10) for context in (1024, 8192, 32_768)),
    sized(1, 8192, 4),
    sized(8, 4096, 10),
    sized(32, 4096, 4),
]
SMALL_CASES = [sized(2, 70, 3, "fp16"), sized(1, 40, 5, "fp8")]


def _configs(case: Case) -> list[TreeAttentionConfig]:
    shapes = [(64, 32, 4, 4, 2), (64, 64, 4, 2, 2), (64, 64, 4, 3, 1), (64, 64, 4, 3, 2)]
    return [
        TreeAttentionConfig(*shape, min_tiles=min_tiles, prefetch=prefetch)
        for shape, min_tiles, prefetch in product(shapes, (1, 4), (False, True))
    ]


OPS = (
    OpSpec(
        name="draft_attention",
        cases=CASES,
        small_cases=SMALL_CASES,
        make_inputs=draft_inputs,
        reference=reference,
        check=check,
        providers={
            "ours": Provider(others.ours),
            "torch": Provider(others.torch_sdpa, others.no_torch),
            "sglang_triton": Provider(others.sglang_decode, needs("sglang")),
            "fa3_cascade": Provider(others.fa3_cascade, others.no_fa3),
        },
        baseline="sglang_triton",
        bytes=least_bytes,
        flops=flops,
        axes=("context",),
        tuning=Tuning(_configs, others.ours),
    ),
)
