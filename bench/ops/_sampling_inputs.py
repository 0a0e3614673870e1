"""Cases and inputs of the acceptance at temperature > 0."""

from typing import NamedTuple

import torch
from torch import Tensor

from bench.op import Case
from bench.ops._tree_inputs import SMALL_VOCAB, VOCAB, round_inputs
from frspec_kernels import tree
from frspec_kernels.sampling import Sampling
from frspec_kernels.sampling_tree_reference import SampledPath, accept_sampled_reference

# Temperature, top-k, top-p, min-p.
KINDS = {
    "plain": (0.8, 0, 1.0, 0.0),
    "top_p": (0.8, 0, 0.9, 0.0),
    "top_k": (0.8, 50, 0.9, 0.0),
    "min_p": (0.8, 0, 1.0, 0.05),
    "flat": (3.0, 0, 0.95, 0.0),
}
CASES = [
    Case(batch=batch, top_k=10, steps=6, nodes=60, kind=kind)
    for kind in ("top_p", "plain", "top_k", "flat", "min_p")
    for batch in (1, 32)
]
SMALL = [Case(batch=2, top_k=2, steps=2, nodes=5, kind=kind) for kind in ("plain", "top_k")]
# The exponent of a natural vocabulary: the 6,000 likeliest ids are above 1e-6.
ZIPF = 1.5


class Verification(NamedTuple):
    """What the target and the draft bring to an acceptance."""

    logits: Tensor  # [B * N, V] float32
    built: tree.BuiltTree
    seq_lens: Tensor
    max_path: int
    sampling: Sampling


def make_inputs(case: Case, device: torch.device, seed: int) -> Verification:
    """Rows of Zipf's law, each over another order of the ids; children among the likeliest."""
    drafted = round_inputs(case, device, seed)
    batch, nodes = drafted.built.tokens.shape
    vocab = VOCAB if device.type == "cuda" else SMALL_VOCAB
    generator = torch.Generator(device).manual_seed(seed)
    ids = torch.arange(vocab, device=device)
    rows = torch.arange(batch * nodes, device=device)
    logits = torch.empty(batch * nodes, vocab, device=device)
    for part in rows.split(64):  # the intermediate results of all rows would not fit
        rank = (ids * 40_507 + part[:, None] * 7_919) % vocab
        noise = torch.randn(rank.shape, generator=generator, device=device)
        logits[part] = noise * 0.5 - ZIPF * (rank + 1).float().log()
    parents = drafted.built.parents
    sibling = (parents[:, :, None] == parents[:, None, :]).tril(-1).sum(-1)
    above = (torch.arange(batch, device=device)[:, None] * nodes + parents)[:, 1:]
    logits[above, drafted.built.tokens[:, 1:]] = -0.7 * sibling[:, 1:].float()
    return Verification(
        logits, drafted.built, drafted.lens, case["steps"] + 1, _sampling(case, device, seed)
    )


def _sampling(case: Case, device: torch.device, seed: int) -> Sampling:
    temperature, top_k, top_p, min_p = KINDS[case["kind"]]

    def each(value: float, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.full((case["batch"],), value, dtype=dtype, device=device)

    seeds = torch.arange(case["batch"], device=device) + 1000 * seed
    truncates = case["kind"] != "plain"
    return Sampling(
        each(temperature), each(top_k, torch.int32), each(top_p), each(min_p), seeds, truncates
    )


def reference(inputs: Verification) -> tuple[Verification, list[SampledPath]]:
    """The inputs and each request's outcome in float64."""
    built = inputs.built
    paths = accept_sampled_reference(
        inputs.logits, built.tokens, built.parents, inputs.seq_lens, inputs.sampling
    )
    return inputs, paths
