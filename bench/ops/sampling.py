"""Acceptance of a draft tree at temperature > 0: from logits to the accepted path.

``sgl_kernel`` is SGLang's chain: quotient and softmax over every row, top-k and top-p renormalised
(flashinfer's kernels as compiled into sgl_kernel), zeros for the draft's probabilities, random
coins, its tree kernel. ``flashinfer`` is the same with flashinfer's own renormalisation, which
SGLang takes where flashinfer is installed. There is no min-p in it. Its outcome comes from other
random numbers, so only its form is checked.
"""

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from bench.checks import Verdict, fail
from bench.op import Case, OpSpec, Provider, Thunk
from bench.ops import _tree_stock as stock
from bench.ops._sampling_inputs import CASES, KINDS, SMALL, Verification, make_inputs, reference
from bench.ops._tree_inputs import VOCAB
from bench.providers import needs, poisoned
from frspec_kernels.sampling import accept_sampled, allocate_sampling_workspace
from frspec_kernels.sampling_tree_reference import SampledPath
from frspec_kernels.tree import empty_accepted

# A decision of float32 may differ from float64's within this share of a chance.
CLEAR = 2e-5


def _check_paths(
    out: tuple[Tensor, ...], expected: tuple[Verification, list[SampledPath]]
) -> Verdict:
    inputs, paths = expected
    index, lens, predicts = (t.cpu() for t in out)
    nodes = inputs.built.tokens.shape[1]
    doubtful = 0
    for b, path in enumerate(paths):
        if path.margin <= CLEAR:
            doubtful += 1
            continue
        rows = [b * nodes + node for node in path.nodes]
        if index[b, : int(lens[b])].tolist() != rows:
            return fail(f"request {b}: nodes {index[b].tolist()}, expected {rows}")
        if int(predicts[rows[-1]]) != path.bonus:
            return fail(f"request {b}: drew {int(predicts[rows[-1]])}, expected {path.bonus}")
    if doubtful > 1 + len(paths) // 20:
        return fail(f"{doubtful} of {len(paths)} outcomes are within rounding")
    return Verdict(True)


def check_form(out: tuple[Tensor, ...], inputs: Verification) -> Verdict:
    """Accepted nodes are a path from the root, and what is said at each is the next one's token."""
    index, lens, predicts = (t.cpu() for t in out)
    batch, nodes = inputs.built.tokens.shape
    tokens, parents = inputs.built.tokens.cpu(), inputs.built.parents.cpu()
    for b in range(batch):
        path = (index[b, : int(lens[b])] - b * nodes).tolist()
        links = list(zip(path[1:], path[:-1], strict=True))
        if path[0] != 0 or any(int(parents[b, child]) != parent for child, parent in links):
            return fail(f"request {b}: {path} is no path")
        if any(int(tokens[b, child]) != int(predicts[b * nodes + up]) for child, up in links):
            return fail(f"request {b}: tokens said do not lead along {path}")
    return Verdict(True)


def _ours(inputs: Verification) -> Thunk:
    batch, nodes = inputs.built.tokens.shape
    device, vocab = inputs.logits.device, inputs.logits.shape[1]
    memory = allocate_sampling_workspace(
        batch, nodes, vocab, inputs.max_path, device, truncates=inputs.sampling.truncates
    )
    out = empty_accepted(batch, nodes, inputs.max_path, device)
    for tensor in (*memory, *(t for t in out if t is not None)):
        tensor.fill_(float("nan") if tensor.is_floating_point() else -1)

    def call() -> tuple[Tensor, ...]:
        accept_sampled(
            inputs.logits, inputs.built.tokens, inputs.built.parents, inputs.seq_lens,
            inputs.max_path, inputs.sampling, workspace=memory, out=out,
        )  # fmt: skip
        return out.accept_index, out.accept_lens, out.predicts

    return call


Renormalise = Callable[[Tensor, Tensor], Tensor]


def _in_sgl_kernel() -> tuple[Renormalise, Renormalise]:
    """The compiled top-k and top-p; the public names take flashinfer's where that is present."""
    sampling: Any = importlib.import_module("sgl_kernel.sampling")
    return (
        lambda probs, k: sampling._top_k_renorm_probs_internal(probs, k, 0),
        lambda probs, p: sampling._top_p_renorm_probs_internal(probs, p, 0.0),
    )


def _in_flashinfer() -> tuple[Renormalise, Renormalise]:
    sampling: Any = importlib.import_module("flashinfer.sampling")
    return sampling.top_k_renorm_probs, sampling.top_p_renorm_probs


def _stock(inputs: Verification, renormalise: tuple[Renormalise, Renormalise]) -> Thunk:
    batch, nodes = inputs.built.tokens.shape
    device, sampling, built = inputs.logits.device, inputs.sampling, inputs.built
    top_k_renorm, top_p_renorm = renormalise
    verify = stock.kernel("tree_speculative_sampling_target_only")
    cuts_k, cuts_p = bool((sampling.top_ks > 0).all()), bool((sampling.top_ps < 1).all())
    predicts = poisoned(batch * nodes, dtype=torch.int32, device=device)
    index = poisoned(batch, inputs.max_path, dtype=torch.int32, device=device)
    count = poisoned(batch, dtype=torch.int32, device=device)

    def call() -> tuple[Tensor, ...]:
        temperatures = torch.repeat_interleave(sampling.temperatures[:, None], nodes, dim=0)
        probs = torch.softmax(inputs.logits / temperatures, dim=-1)
        if cuts_k:
            probs = top_k_renorm(probs, torch.repeat_interleave(sampling.top_ks, nodes, dim=0))
        if cuts_p:
            probs = top_p_renorm(probs, torch.repeat_interleave(sampling.top_ps, nodes, dim=0))
        probs = probs.view(batch, nodes, -1)
        verify(
            predicts=predicts,
            accept_index=index,
            accept_token_num=count,
            candidates=built.tokens,
            retrive_index=built.retrieve_index,
            retrive_next_token=built.next_token,
            retrive_next_sibling=built.next_sibling,
            uniform_samples=torch.rand(batch, nodes, device=device),
            uniform_samples_for_final_sampling=torch.rand(batch, device=device),
            target_probs=probs,
            draft_probs=torch.zeros_like(probs),
            threshold_single=1.0,
            threshold_acc=1.0,
            deterministic=True,
        )
        return index, count + 1, predicts

    return call


SGL = needs("sgl_kernel")


def _stock_missing(case: Case) -> str | None:
    if KINDS[case["kind"]][3] > 0:
        return "SGLang's verification has no min-p"
    return SGL(case)


def _flashinfer_missing(case: Case) -> str | None:
    if reason := _stock_missing(case) or needs("flashinfer")(case):
        return reason
    if case["kind"] == "plain":
        return "nothing to renormalise: the same chain as sgl_kernel"
    module = importlib.import_module("flashinfer.jit.sampling").gen_sampling_module()
    return None if module.is_compiled else "flashinfer's sampling module is not compiled"


def _bytes(case: Case) -> float:
    """One row of logits a request at the least: the one that its last token is drawn from."""
    return 4.0 * case["batch"] * VOCAB


def _flops(case: Case) -> float:
    return 8.0 * case["batch"] * VOCAB


OPS = (
    OpSpec(
        name="accept_sampled",
        cases=CASES,
        small_cases=SMALL,
        make_inputs=make_inputs,
        reference=reference,
        check=_check_paths,
        providers={
            "ours": Provider(_ours),
            "sgl_kernel": Provider(
                lambda inputs: _stock(inputs, _in_sgl_kernel()), _stock_missing, check_form
            ),
            "flashinfer": Provider(
                lambda inputs: _stock(inputs, _in_flashinfer()), _flashinfer_missing, check_form
            ),
        },
        baseline="sgl_kernel",
        bytes=_bytes,
        flops=_flops,
    ),
)
