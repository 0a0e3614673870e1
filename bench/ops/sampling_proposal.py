"""Proposals at temperature > 0: a draft step's children, fixed ones and one drawn.

``ours`` reads the head once: its kernel gives each row's ``k`` best candidates, and a launch of one
warp a row draws from them. ``greedy`` is that kernel for the children alone, without a draw: what
the draw adds is the difference. ``torch`` draws from the whole reduced vocabulary: product, softmax
at the temperature, top-k, an exponential race. Its random numbers are its own, so only its form is
checked.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from bench.checks import Verdict, fail
from bench.op import Case, OpSpec, Provider, Thunk
from bench.ops._reduced_topk_check import check_float32
from bench.ops._reduced_topk_inputs import Inputs, make_inputs, reference, sized
from bench.providers import poisoned
from frspec_kernels.reduced_topk import (
    TopK,
    allocate_output,
    allocate_workspace,
    reduced_vocab_topk,
)
from frspec_kernels.sampling_proposal import Children, draw_children
from frspec_kernels.sampling_proposal_reference import draw_children_reference

TEMPERATURE = 0.8
SEED, POSITION, DEPTH = 77, 500, 2
MOST_CHILDREN = 10
CASES = [sized(rows, 32768, 4096, k) for rows in (1, 10, 64) for k in (16, 32, 64)]
SMALL_CASES = [sized(3, 300, 64, 16, "fp16", "contiguous")]


class Proposals(NamedTuple):
    """A step's list, and the children made of it."""

    best: TopK
    children: Children


def children_of(inputs: Inputs) -> int:
    """K: as many as a default tree has, or half of the list."""
    return min(MOST_CHILDREN, inputs.k // 2)


def _head(inputs: Inputs, k: int) -> Callable[[], TopK]:
    """A pass over the head for each row's ``k`` best."""
    rows, device = inputs.hidden.shape[0], inputs.hidden.device
    workspace = allocate_workspace(
        rows, *inputs.head.shape,
        dtype=inputs.hidden.dtype, device=device, head_dtype=inputs.head.dtype,
    )  # fmt: skip
    out = allocate_output(rows, k, device)
    return lambda: reduced_vocab_topk(
        inputs.hidden, inputs.head, k, workspace=workspace, out=out, **inputs.options
    )


def _ours(inputs: Inputs) -> Thunk:
    rows, device, k = inputs.hidden.shape[0], inputs.hidden.device, children_of(inputs)
    head = _head(inputs, inputs.k)
    children = Children(
        poisoned(rows, k, dtype=torch.int64, device=device),
        poisoned(rows, k, dtype=torch.float32, device=device),
        poisoned(rows, inputs.k, dtype=torch.float32, device=device),
    )
    temperatures = torch.full((1,), TEMPERATURE, device=device)
    seeds = torch.full((1,), SEED, device=device)
    lens = torch.full((1,), POSITION, device=device)

    def call() -> Proposals:
        best = head()
        draw_children(
            best.probs, best.token_ids, temperatures, seeds, lens, DEPTH,
            children=k, fixed=k - 1, out=children,
        )  # fmt: skip
        return Proposals(best, children)

    return call


def _greedy(inputs: Inputs) -> Thunk:
    return _head(inputs, children_of(inputs))


def _torch(inputs: Inputs) -> Thunk:
    fixed = children_of(inputs) - 1

    def call() -> Tensor:
        logits = (inputs.hidden @ inputs.dense.T).float() / TEMPERATURE
        q = logits.softmax(-1)
        best = q.topk(fixed, dim=-1).indices
        race = torch.empty_like(q).exponential_()
        speeds = (q / race).scatter(1, best, -1.0)
        ids = torch.cat([best, speeds.argmax(-1, keepdim=True)], 1)
        return inputs.token_map[ids]

    return call


def check_proposals(out: Proposals, inputs: Inputs) -> Verdict:
    """The list is the head's; the children are what float64 makes of it."""
    verdict = check_float32(out.best, reference(inputs))
    probs, ids = out.best.probs.cpu(), out.best.token_ids.cpu()
    k = out.children.token_ids.shape[1]
    for row in range(len(ids)):
        tokens, scores, q = draw_children_reference(
            probs[row], ids[row], TEMPERATURE, SEED, POSITION, DEPTH, row, k, k - 1
        )
        got = out.children.token_ids[row].tolist()
        if got != tokens:
            return fail(f"row {row}: children {got}, expected {tokens}")
        wrong = (out.children.q[row].cpu().double() - q).abs().max()
        wrong = max(wrong, (out.children.scores[row].cpu() - torch.tensor(scores)).abs().max())
        if not wrong < 2e-6:
            return fail(f"row {row}: probabilities are off by {float(wrong):.1e}")
    return verdict


def check_form(ids: Tensor, inputs: Inputs) -> Verdict:
    """Distinct tokens of the map."""
    if not torch.isin(ids, inputs.token_map).all():
        return fail("a child is not in the map")
    ordered = ids.sort(-1).values
    if (ordered[:, 1:] == ordered[:, :-1]).any():
        return fail("a child occurs twice")
    return Verdict(True)


def _check_greedy(out: TopK, inputs: Inputs) -> Verdict:
    return check_float32(out, reference(inputs))


def _bytes(case: Case) -> float:
    return 2.0 * case["V"] * case["H"] + 8.0 * case["V"] + 2.0 * case["rows"] * case["H"]


def _flops(case: Case) -> float:
    return 2.0 * case["rows"] * case["V"] * case["H"]


OPS = (
    OpSpec(
        name="sampled_proposals",
        cases=CASES,
        small_cases=SMALL_CASES,
        make_inputs=make_inputs,
        reference=lambda inputs: inputs,
        check=check_proposals,
        providers={
            "ours": Provider(_ours),
            "greedy": Provider(_greedy, check=_check_greedy, bytes=_bytes),
            "torch": Provider(_torch, check=check_form),
        },
        baseline="torch",
        bytes=_bytes,
        flops=_flops,
        axes=("rows", "k"),
    ),
)
