"""Cases, inputs, stock chain and reference of :mod:`bench.ops.reduced_topk`."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bench.op import Case
from bench.ops._reduced_topk_check import Reference
from frspec_kernels.reduced_topk import FinalNorm

EPS = 1e-5
FULL_VOCAB = 128_256
MAX_TOKEN_ID = 1 << 18
NARROW_MAX = {"fp8": 448.0, "int8": 127.0}


def sized(rows: int, vocab: int, width: int = 4096, k: int = 10, *words: str) -> Case:
    """``words``: type of the head, and how its rows lie or what stands in front of it."""
    dtype, kind = words or ("bf16", "contiguous")
    return Case(rows=rows, V=vocab, H=width, k=k, dtype=dtype, kind=kind)


CASES = [  # what is asked for most often first: a time limit leaves the last
    *(sized(rows, vocab) for vocab in (32768, 8192) for rows in (1, 4, 16, 64)),
    *(
        sized(rows, 32768, 4096, 10, dtype, kind)
        for dtype, kind in (
            ("fp8", "contiguous"),
            ("int8", "contiguous"),
            ("bf16", "gathered"),
            ("bf16", "norm"),
        )
        for rows in (1, 16)
    ),
    *(sized(rows, 128_256) for rows in (1, 16, 64)),
    *(sized(rows, vocab) for vocab in (16_384, 47_149, 151_936) for rows in (1, 16)),
    *(sized(16, 32768, width) for width in (2048, 3584, 5120, 8192)),
    *(sized(16, 32768, 4096, k) for k in (1, 64)),
]
SMALL_CASES = [
    sized(rows, 300, 64, 5, dtype, kind)
    for rows, dtype, kind in (
        (1, "fp16", "contiguous"),
        (19, "fp16", "contiguous"),
        (3, "fp8", "contiguous"),
        (3, "int8", "contiguous"),
        (3, "fp16", "gathered"),
        (3, "fp16", "norm"),
    )
]


@dataclass(frozen=True)
class Inputs:
    """``dense`` is the contiguous head of the stock chain, in the type of hidden."""

    k: int
    hidden: Tensor
    head: Tensor
    dense: Tensor
    token_map: Tensor
    head_scale: Tensor | None = None
    row_ids: Tensor | None = None
    norm: FinalNorm | None = None

    @property
    def options(self) -> dict[str, Any]:
        """Keyword arguments of :func:`reduced_vocab_topk` that say what to compute."""
        names = ("token_map", "head_scale", "row_ids", "norm")
        return {name: getattr(self, name) for name in names}


def make_inputs(case: Case, device: torch.device, seed: int) -> Inputs:
    """Logits of standard deviation 3, weights per row of different scales, sorted token ids."""
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.randn(*shape, dtype=dtype, device=device, generator=generator)

    rows, vocab, width = case["rows"], case["V"], case["H"]
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float16
    gathered = case["kind"] == "gathered"
    hidden = normal(rows, width, dtype=dtype)
    head = normal(FULL_VOCAB if gathered else vocab, width, dtype=dtype)
    head *= 3 / width**0.5
    ids = torch.randperm(MAX_TOKEN_ID, device=device, generator=generator)[:vocab].sort().values
    rest: dict[str, Any] = {}
    if case["dtype"] in NARROW_MAX:
        limit = NARROW_MAX[case["dtype"]]
        rest["head_scale"] = head.abs().amax(1).float() / limit
        narrow = (head / rest["head_scale"][:, None]).clamp(-limit, limit)
        head = (narrow.round() if case["dtype"] == "int8" else narrow).to(case.torch_dtype)
    if gathered:
        order = torch.randperm(FULL_VOCAB, device=device, generator=generator)
        rest["row_ids"] = order[:vocab].sort().values
    if case["kind"] == "norm":
        weight = 1 + 0.1 * normal(width, dtype=dtype)
        rest["norm"] = FinalNorm(weight, EPS, normal(rows, width, dtype=dtype))
    dense = head[rest["row_ids"]] if gathered else head.to(dtype)
    return Inputs(case["k"], hidden, head, dense, ids, **rest)


def normed(hidden: Tensor, norm: FinalNorm) -> Tensor:
    """The stock chain's final norm, in the type of hidden."""
    if norm.residual is not None:
        hidden = hidden + norm.residual.to(hidden.dtype)
    weight = norm.weight.to(hidden.dtype)
    return torch.nn.functional.rms_norm(hidden, weight.shape, weight, norm.eps)


def logits_of(
    hidden: Tensor, dense: Tensor, scale: Tensor | None, norm: FinalNorm | None
) -> Tensor:
    """The stock chain's logits: in the type of hidden, then float32; all in fp64 if given that."""
    wide = torch.promote_types(hidden.dtype, torch.float32)
    if norm is not None:
        hidden = normed(hidden, norm)
    logits = (hidden @ dense.T).to(wide)
    return logits if scale is None else logits * scale.to(wide)


def stock_chain(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """Probabilities and token ids by SGLang's operations."""
    logits = logits_of(inputs.hidden, inputs.dense, inputs.head_scale, inputs.norm)
    probs, columns = torch.softmax(logits, dim=-1).topk(inputs.k, dim=-1)
    return probs, inputs.token_map[columns]


def reference(inputs: Inputs) -> Reference:
    """From inputs that no provider has touched."""
    scale, norm = inputs.head_scale, inputs.norm
    hidden = inputs.hidden if norm is None else normed(inputs.hidden, norm)
    return Reference(
        logits_of(inputs.hidden.double(), inputs.dense.double(), scale, norm),
        logits_of(inputs.hidden, inputs.dense, scale, norm),
        logits_of(hidden.float(), inputs.dense.float(), scale, None),
        hidden.shape[1],
        inputs.token_map,
    )
