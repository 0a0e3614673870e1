"""The draft head: hidden states to the top-k of a reduced vocabulary.

``eager`` is SGLang's chain of operations: product in the type of hidden, cast to float32, softmax,
top-k, token ids. It always has a contiguous head in the type of hidden; with an fp8 or int8 head or
gathered rows that is a copy made beforehand, of twice the bytes or more. ``flashinfer`` and
``sgl_kernel`` are the same chain with their softmax and top-k. ``gemm`` is the product alone, for
context, and ``full`` the stock chain over the whole vocabulary.
"""

from collections.abc import Callable

import torch

from bench.checks import Verdict, ties_to_smaller_id
from bench.op import Case, OpSpec, Provider, Tuning
from bench.ops import _reduced_topk_rivals as rivals
from bench.ops._reduced_topk_check import check, check_float32
from bench.ops._reduced_topk_inputs import (
    CASES,
    FULL_VOCAB,
    NARROW_MAX,
    SMALL_CASES,
    Inputs,
    make_inputs,
    reference,
)
from bench.providers import needs_gpu, poisoned
from frspec_kernels.reduced_topk import (
    LaunchConfig,
    TopK,
    Workspace,
    allocate_workspace,
    reduced_vocab_topk,
)


def check_ours(out: TopK, inputs: Inputs) -> Verdict:
    """:func:`check_float32`, and the order of equal probabilities."""
    return check_float32(out, reference(inputs)) & ties_to_smaller_id(out.probs, out.token_ids)


def _buffers(inputs: Inputs, config: LaunchConfig | None = None) -> tuple[Workspace, TopK]:
    (rows, width), vocab, device = inputs.hidden.shape, len(inputs.token_map), inputs.hidden.device
    workspace = allocate_workspace(
        rows, vocab, width,
        dtype=inputs.hidden.dtype, device=device, head_dtype=inputs.head.dtype, config=config,
    )  # fmt: skip
    workspace.scores.fill_(float("nan"))
    workspace.bests.fill_(-1)
    workspace.normed.fill_(float("nan"))
    return workspace, TopK(
        poisoned(rows, inputs.k, dtype=torch.float32, device=device),
        poisoned(rows, inputs.k, dtype=torch.int64, device=device),
        poisoned(rows, dtype=torch.float32, device=device),
    )


def _ours(inputs: Inputs, config: LaunchConfig | None = None) -> Callable[[], TopK]:
    workspace, out = _buffers(inputs, config)
    return lambda: reduced_vocab_topk(
        inputs.hidden, inputs.head, inputs.k,
        workspace=workspace, out=out, config=config, **inputs.options,
    )  # fmt: skip


def _full_bytes(case: Case) -> float:
    return _bytes(Case(**{**case.params, "V": FULL_VOCAB}))


def _bytes(case: Case) -> float:
    """The head and the token ids of the winners are what counts; scales, norm and hidden too."""
    rows, vocab, width, k = (case[name] for name in ("rows", "V", "H", "k"))
    narrow = case["dtype"] in NARROW_MAX
    total = vocab * width * (1 if narrow else 2) + 4 * vocab * narrow
    total += 8 * vocab * (1 + (case["kind"] == "gathered"))  # token map; rows to gather
    total += 2 * rows * width * (3 if case["kind"] == "norm" else 1)
    return total + rows * (12 * k + 4)


def _flops(case: Case) -> float:
    return 2.0 * case["rows"] * case["V"] * case["H"]


def _configs(case: Case) -> list[LaunchConfig]:
    """Head rows, hidden elements, warps, stages: as many stages as shared memory might hold."""
    narrow = case["dtype"] in NARROW_MAX
    if narrow:  # two warps (one for 16 rows) use the products that read whole words
        sizes = [(16, 256, 1), (16, 512, 1), (32, 128, 2), (32, 256, 2), (32, 512, 2), (32, 256, 4)]
        sizes += [(64, 128, 2), (64, 256, 2), (64, 128, 4), (64, 256, 4), (128, 128, 2)]
        sizes += [(128, 256, 2), (128, 128, 4), (128, 256, 4), (128, 256, 8)]
    else:
        sizes = [(32, 128, 2), (32, 256, 2), (32, 256, 4), (64, 64, 4), (64, 128, 2), (64, 128, 4)]
        sizes += [(64, 256, 4), (128, 64, 4), (128, 128, 4), (128, 128, 8), (256, 64, 8)]
    itemsize, rows = (1 if narrow else 2), max(case["rows"], 16)
    return [
        LaunchConfig(block_v, block_h, warps, stages)
        for block_v, block_h, warps in sizes
        for stages in (2, 3, 4, 5, 6, 8)
        if stages * block_h * (block_v * itemsize + rows * 2) <= 220 << 10
    ]


OPS = (
    OpSpec(
        name="reduced_topk",
        cases=CASES,
        small_cases=SMALL_CASES,
        make_inputs=make_inputs,
        reference=reference,
        check=check,
        providers={
            "ours": Provider(_ours, check=check_ours),
            "eager": Provider(rivals.eager),
            "compiled": Provider(rivals.compiled_chain, rivals.not_compiled),
            "flashinfer": Provider(rivals.flashinfer, rivals.plain_only("flashinfer")),
            "sgl_kernel": Provider(rivals.sgl_kernel, rivals.plain_only("sgl_kernel")),
            "gemm": Provider(rivals.gemm, needs_gpu, rivals.check_gemm, rivals.gemm_bytes),
            "full": Provider(rivals.full, rivals.full_only_beside, rivals.check_full, _full_bytes),
        },
        baseline="eager",
        bytes=_bytes,
        flops=_flops,
        axes=("V", "rows"),
        tuning=Tuning(_configs, _ours),
    ),
)
