"""What :mod:`bench.ops.reduced_topk` is compared with."""

import importlib
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from bench.checks import Verdict, no_worse_than_torch
from bench.op import Case
from bench.ops._reduced_topk_check import check
from bench.ops._reduced_topk_inputs import (
    FULL_VOCAB,
    Inputs,
    logits_of,
    reference,
    stock_chain,
)
from bench.providers import compiled, needs, needs_gpu, poisoned


def eager(inputs: Inputs) -> Callable[[], tuple[Tensor, Tensor]]:
    """The stock chain."""
    return lambda: stock_chain(inputs)


@cache
def _compiled_chain() -> Callable[..., tuple[Tensor, Tensor]]:
    def chain(hidden: Tensor, dense: Tensor, token_map: Tensor, k: int) -> tuple[Tensor, Tensor]:
        return stock_chain(Inputs(k, hidden, dense, dense, token_map))

    return compiled(chain)


def compiled_chain(inputs: Inputs) -> Callable[[], tuple[Tensor, Tensor]]:
    """The stock chain by ``torch.compile``."""
    chain = _compiled_chain()
    return lambda: chain(inputs.hidden, inputs.dense, inputs.token_map, inputs.k)


def _is_plain(case: Case) -> bool:
    return (case["dtype"], case["kind"], case["H"], case["k"]) == ("bf16", "contiguous", 4096, 10)


def not_compiled(case: Case) -> str | None:
    """Compilation takes seconds a case: one row count at three sizes shows what it gives."""
    if _is_plain(case) and case["rows"] == 16 and case["V"] in (8192, 32768, FULL_VOCAB):
        return needs_gpu(case)
    return "compiled at 16 rows and three sizes only"


def flashinfer(inputs: Inputs) -> Callable[[], tuple[Tensor, Tensor]]:
    """The stock chain with flashinfer's softmax and top-k."""
    package = importlib.import_module("flashinfer")

    def call() -> tuple[Tensor, Tensor]:
        logits = logits_of(inputs.hidden, inputs.dense, inputs.head_scale, inputs.norm)
        probs, columns = package.top_k(package.sampling.softmax(logits), inputs.k, sorted=True)
        return probs, inputs.token_map[columns]

    return call


def sgl_kernel(inputs: Inputs) -> Callable[[], tuple[Tensor, Tensor]]:
    """The product, then sgl_kernel's one kernel for softmax and top-k, made for expert routing.

    Its ``fast_topk`` is PyTorch's at a k of this size, its ``fast_topk_v2`` for 2,048 alone.
    """
    topk_softmax = importlib.import_module("sgl_kernel").topk_softmax
    shape, device = (len(inputs.hidden), inputs.k), inputs.hidden.device
    probs = poisoned(*shape, dtype=torch.float32, device=device)
    columns = torch.zeros(shape, dtype=torch.int32, device=device)

    def call() -> tuple[Tensor, Tensor]:
        topk_softmax(probs, columns, inputs.hidden @ inputs.dense.T)
        return probs, inputs.token_map[columns]

    return call


def plain_only(package: str) -> Callable[[Case], str | None]:
    """``missing`` of a chain of ``package``: it runs where it computes all that the stock does."""
    missing = needs(package)
    return lambda case: missing(case) if _is_plain(case) else "at H = 4096, bf16, top-10 only"


def gemm(inputs: Inputs) -> Callable[[], Tensor]:
    """The product alone."""
    return lambda: inputs.hidden @ inputs.dense.T


def check_gemm(out: Tensor, inputs: Inputs) -> Verdict:
    truth = inputs.hidden.double() @ inputs.dense.double().T
    return no_worse_than_torch(out, inputs.hidden @ inputs.dense.T, truth)


def gemm_bytes(case: Case) -> float:
    return 2 * (case["V"] * case["H"] + case["rows"] * (case["H"] + case["V"]))


def _full_head(inputs: Inputs) -> Inputs:
    head = torch.randn(
        FULL_VOCAB, inputs.hidden.shape[1], dtype=inputs.hidden.dtype, device=inputs.hidden.device
    )
    head *= 3 / inputs.hidden.shape[1] ** 0.5
    return Inputs(inputs.k, inputs.hidden, head, head, torch.arange(FULL_VOCAB, device=head.device))


def full(inputs: Inputs) -> Callable[[], tuple[Tensor, ...]]:
    """The stock chain over the whole vocabulary, and its head."""
    whole = _full_head(inputs)
    return lambda: (*stock_chain(whole), whole.dense)


def check_full(out: tuple[Tensor, ...], inputs: Inputs) -> Verdict:
    probs, token_ids, head = out
    whole = Inputs(inputs.k, inputs.hidden, head, head, torch.arange(len(head), device=head.device))
    return check((probs, token_ids), reference(whole))


def full_only_beside(case: Case) -> str | None:
    if _is_plain(case) and case["V"] == 32768:
        return needs_gpu(case)
    return "the whole vocabulary does not change with V"
