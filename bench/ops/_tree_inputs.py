"""Cases and inputs of the tree's bookkeeping."""

from typing import NamedTuple

import torch
from torch import Tensor

from bench.op import Case
from frspec_kernels import tree
from frspec_kernels.tree_reference import build_tree_reference, grow_tree_reference

VOCAB = 128_256
SMALL_VOCAB = 131
HIDDEN = 4096
TIMED_STEP = 2

CASES = [
    Case(batch=batch, top_k=top_k, steps=steps, nodes=nodes)
    for top_k, steps, nodes in ((10, 6, 60), (4, 3, 16), (16, 6, 200))
    for batch in (1, 8, 32)
]
LOGITS = [
    Case(batch=batch, top_k=10, steps=6, nodes=60, dtype=dtype)
    for batch in (1, 8)
    for dtype in ("bf16", "fp32")
]
SMALL = [Case(batch=2, top_k=3, steps=3, nodes=14), Case(batch=1, top_k=1, steps=3, nodes=4)]
SMALL_LOGITS = [Case(batch=2, top_k=3, steps=3, nodes=14, dtype=d) for d in ("bf16", "fp32")]


def shape_of(case: Case) -> tree.TreeShape:
    """The case's tree."""
    return tree.TreeShape(case["top_k"], case["steps"], case["nodes"])


class Round(NamedTuple):
    """All that a round's bookkeeping gets from the models, and what earlier parts made of it."""

    shape: tree.TreeShape
    probs: list[Tensor]  # of each step, [B, K] then [B * K, K]
    token_ids: list[Tensor]
    hidden: list[Tensor]  # [B, H] then [B * K, H]
    roots: Tensor  # [B]
    lens: Tensor  # [B]
    candidates: tree.Candidates  # complete
    built: tree.BuiltTree
    target: Tensor  # [B, N] or logits [B * N, V]


def round_inputs(case: Case, device: torch.device, seed: int) -> Round:
    """A round of random proposals; the target agrees with half of the nodes' first children."""
    generator = torch.Generator(device).manual_seed(seed)
    shape, batch = shape_of(case), case["batch"]
    vocab = VOCAB if device.type == "cuda" else SMALL_VOCAB
    candidates = tree.empty_candidates(shape, batch, device)
    probs, tokens, hidden = [], [], []
    for step in range(shape.steps):
        rows = batch if step == 0 else batch * shape.top_k
        scores = torch.randn(rows, min(vocab, 4096), generator=generator, device=device) * 2
        top = scores.softmax(-1).topk(shape.top_k)
        probs.append(top.values)
        tokens.append(top.indices)
        hidden.append(
            torch.randn(rows, HIDDEN, generator=generator, device=device).to(torch.bfloat16)
        )
        grow_tree_reference(candidates, shape, step, probs[-1], tokens[-1])
    roots = torch.randint(vocab, (batch,), generator=generator, device=device)
    lens = torch.randint(1, 9000, (batch,), generator=generator, device=device)
    built = build_tree_reference(candidates, shape, roots, lens)
    said = torch.randint(vocab, built.tokens.shape, generator=generator, device=device)
    child = built.tokens.gather(1, built.next_token.clamp(min=0))
    half = torch.rand(said.shape, generator=generator, device=device) < 0.5
    target = torch.where(half & (built.next_token > 0), child, said)
    if "dtype" in case.params:
        logits = torch.randn(target.numel(), vocab, generator=generator, device=device)
        target = logits.scatter_(1, target.view(-1, 1), 30.0).to(case.torch_dtype)
    return Round(shape, probs, tokens, hidden, roots, lens, candidates, built, target)
