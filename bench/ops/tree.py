"""The draft tree's bookkeeping: one growth step, the build, the acceptance, and a whole round.

``tree_grow`` is one later step with its gather of hidden states. ``tree_accept`` has the target's
argmax given; ``tree_accept_logits`` starts from logits. ``tree_round`` is all of it, without the
models. Stock growth runs eagerly in ``torch`` and ``sgl_kernel``, compiled as SGLang does it in
``torch.compile`` and ``sglang``.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from bench.checks import Verdict, equal, fail
from bench.op import Case, Inputs, OpSpec, Provider, Thunk
from bench.ops import _tree_stock as stock
from bench.ops._tree_inputs import (
    CASES,
    HIDDEN,
    LOGITS,
    SMALL,
    SMALL_LOGITS,
    SMALL_VOCAB,
    TIMED_STEP,
    VOCAB,
    Round,
    round_inputs,
    shape_of,
)
from bench.providers import needs, needs_gpu
from frspec_kernels import tree
from frspec_kernels.tree_reference import (
    accept_greedy_reference,
    build_tree_reference,
    grow_tree_reference,
    pack_mask,
)

Named = dict[str, Tensor]  # outputs that every provider has, under one name
SGL = needs("sgl_kernel")


def _all_equal(out: Named, expected: Named) -> Verdict:
    missing = expected.keys() - out.keys()
    verdict = fail(f"lacks {sorted(missing)}") if missing else Verdict(True)
    for name, value in expected.items():
        if name in out:
            verdict = verdict & equal(out[name].flatten(), value.flatten(), name)
    return verdict


def _poison(outputs: Sequence[Tensor | None]) -> Any:
    for tensor in outputs:
        if tensor is not None:
            tensor.fill_(float("nan") if tensor.is_floating_point() else -1)
    return outputs


# tree_grow


def _level(shape: tree.TreeShape, step: int, candidates: tree.Candidates, beams: Any) -> Named:
    k = shape.top_k
    part = slice(k + (step - 1) * k * k, k + step * k * k)
    return {
        "tokens": beams.tokens,
        "hidden": beams.hidden,
        "scores": candidates.scores[:, part],
        "candidate tokens": candidates.tokens[:, part],
        "parents": candidates.parents[:, 1 + step * k :][:, :k],
    }


def _step_of(inputs: Round) -> int:
    return min(TIMED_STEP, inputs.shape.steps - 2)


def _grow_reference(inputs: Round) -> Named:
    step = _step_of(inputs)
    arguments = inputs.probs[step], inputs.token_ids[step], inputs.hidden[step]
    beams = grow_tree_reference(inputs.candidates, inputs.shape, step, *arguments)
    return _level(inputs.shape, step, inputs.candidates, beams)


def _ours_grow(inputs: Round) -> Thunk:
    step, shape, batch = _step_of(inputs), inputs.shape, inputs.roots.numel()
    probs, tokens, hidden = inputs.probs[step], inputs.token_ids[step], inputs.hidden[step]
    out = _poison(tree.empty_beams(shape, batch, probs.device, hidden_size=HIDDEN))

    def call() -> Named:
        tree.grow_tree(inputs.candidates, shape, step, probs, tokens, hidden=hidden, out=out)
        return _level(shape, step, inputs.candidates, out)

    return call


def _torch_grow(inputs: Round, later: Any = None) -> Thunk:
    step, shape = _step_of(inputs), inputs.shape
    k = shape.top_k
    beams = inputs.candidates.parents[:, 1 + (step - 1) * k :][:, :k]
    scores = inputs.candidates.scores.gather(1, beams)
    arguments = inputs.probs[step], inputs.token_ids[step], inputs.hidden[step], scores

    def call() -> Named:
        level = stock.grow(shape, step, *arguments, later)
        return {
            "tokens": level.tokens,
            "hidden": level.hidden,
            "scores": level.scores,
            "candidate tokens": level.candidate_tokens,
            "parents": level.parents,
        }

    return call


# tree_build


def _built(out: tree.BuiltTree) -> Named:
    names = ("tokens", "positions", "retrieve_index", "next_token", "next_sibling", "mask")
    return {name: getattr(out, name) for name in names}


def _ours_build(inputs: Round) -> Thunk:
    out = _poison(tree.empty_tree(inputs.shape, inputs.roots.numel(), inputs.roots.device))
    arguments = inputs.candidates, inputs.shape, inputs.roots, inputs.lens
    return lambda: _built(tree.build_tree(*arguments, out=out))


def _lists(inputs: Round) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """The stock path's three lists, from complete candidates."""
    k, steps, batch = inputs.shape.top_k, inputs.shape.steps, inputs.roots.numel()
    sizes = [k, *[k * k] * (steps - 1)]
    scores = [s.reshape(batch, -1, k) for s in inputs.candidates.scores.split(sizes, 1)]
    tokens = [t.contiguous() for t in inputs.candidates.tokens.split(sizes, 1)]
    widths = [k + 1, *[k] * (steps - 2)] if steps > 1 else [1]
    parents = [p.contiguous() for p in inputs.candidates.parents.split(widths, 1)]
    return scores, tokens, [*parents, parents[-1]]  # the last step's entry is dropped


def _sgl_build(inputs: Round) -> Thunk:
    lists = _lists(inputs)

    def call() -> stock.StockTree:
        organised = stock.organise(inputs.shape, *lists)
        return stock.build(inputs.shape, *organised, inputs.roots, inputs.lens)

    return call


def _check_stock_tree(out: stock.StockTree, inputs: Round) -> Verdict:
    named = out._asdict() | {"mask": pack_mask(out.mask)}
    return _all_equal(named, _built(inputs.built))


# tree_accept


def _accepted(out: tree.Accepted) -> Named:
    return {"index": out.accept_index, "lens": out.accept_lens, "predicts": out.predicts}


def _argmax(inputs: Round) -> Tensor:
    if not inputs.target.is_floating_point():
        return inputs.target
    return inputs.target.argmax(-1).view_as(inputs.built.tokens)


def _torch_accept(inputs: Round) -> Thunk:
    built, width = inputs.built, inputs.shape.steps + 1

    def call() -> Named:
        target = _argmax(inputs)
        arguments = built.tokens, built.parents, target, inputs.lens, width
        return _accepted(accept_greedy_reference(*arguments))

    return call


def _ours_accept(inputs: Round) -> Thunk:
    built, shape, target = inputs.built, inputs.shape, inputs.target
    batch, device = inputs.roots.numel(), inputs.roots.device
    out = _poison(tree.empty_accepted(batch, shape.nodes, shape.steps + 1, device))
    keys = None
    if target.is_floating_point():
        keys = tree.empty_argmax_keys(target.shape[0], target.shape[1], device)
    arguments = built.tokens, built.parents, target, inputs.lens, shape.steps + 1
    return lambda: _accepted(tree.accept_greedy(*arguments, argmax_keys=keys, out=out))


def _sgl_accept(inputs: Round) -> Thunk:
    built = inputs.built
    links = built.retrieve_index, built.next_token, built.next_sibling

    def call() -> Named:
        predicts, index, count = stock.accept(inputs.shape, built.tokens, links, _argmax(inputs))
        return {"index": index, "lens": count + 1, "predicts": predicts}

    return call


# tree_round


def _round_reference(inputs: Round) -> Named:
    return _built(inputs.built) | _torch_accept(inputs)()


def ours_round(inputs: Round) -> Thunk:
    """Every step, the build and the acceptance, in our kernels."""
    shape, batch, device = inputs.shape, inputs.roots.numel(), inputs.roots.device
    candidates = _poison(tree.empty_candidates(shape, batch, device))
    beams = _poison(tree.empty_beams(shape, batch, device, hidden_size=HIDDEN))
    out = _poison(tree.empty_tree(shape, batch, device))
    outcome = _poison(tree.empty_accepted(batch, shape.nodes, shape.steps + 1, device))
    proposals = list(zip(inputs.probs, inputs.token_ids, inputs.hidden, strict=True))

    def call() -> Named:
        for step, (probs, tokens, hidden) in enumerate(proposals):
            tree.grow_tree(candidates, shape, step, probs, tokens, hidden=hidden, out=beams)
        tree.build_tree(candidates, shape, inputs.roots, inputs.lens, out=out)
        arguments = out.tokens, out.parents, inputs.target, inputs.lens, shape.steps + 1
        return _built(out) | _accepted(tree.accept_greedy(*arguments, out=outcome))

    return call


def sgl_round(inputs: Round, later: Any = None) -> Thunk:
    """The same in PyTorch operators and SGLang's kernels."""
    shape = inputs.shape
    proposals = list(zip(inputs.probs, inputs.token_ids, inputs.hidden, strict=True))

    def call() -> tuple[stock.StockTree, Named]:
        levels: list[stock.Level] = []
        for step, proposed in enumerate(proposals):
            scores = levels[-1].beam_scores if levels else None
            levels.append(stock.grow(shape, step, *proposed, scores, later))
        lists = [lv.scores for lv in levels], [lv.candidate_tokens for lv in levels]
        organised = stock.organise(shape, *lists, [lv.parents for lv in levels])
        made = stock.build(shape, *organised, inputs.roots, inputs.lens)
        links = made.retrieve_index, made.next_token, made.next_sibling
        predicts, index, count = stock.accept(shape, made.tokens, links, inputs.target)
        return made, {"index": index, "lens": count + 1, "predicts": predicts}

    return call


def _check_round(out: tuple[stock.StockTree, Named], inputs: Round) -> Verdict:
    return _check_stock_tree(out[0], inputs) & _all_equal(out[1], _torch_accept(inputs)())


def _grow_bytes(case: Case) -> float:
    k = case["top_k"]
    return case["batch"] * (2 * 12 * k * k + 2 * 2 * k * HIDDEN + 24 * k)


def _build_bytes(case: Case) -> float:
    shape = shape_of(case)
    return case["batch"] * (
        12 * shape.candidates + 8 * shape.parents + shape.nodes * (6 * 8 + 2 * 4 + 4 * shape.words)
    )


def _accept_bytes(case: Case) -> float:
    return case["batch"] * (case["nodes"] * 24 + (case["steps"] + 1) * 12 + 28)


def _logits_bytes(case: Case) -> float:
    vocab = VOCAB if torch.cuda.is_available() else SMALL_VOCAB
    return case["batch"] * case["nodes"] * vocab * case.torch_dtype.itemsize + _accept_bytes(case)


def _round_bytes(case: Case) -> float:
    return case["steps"] * _grow_bytes(case) + _build_bytes(case) + _accept_bytes(case)


def _op(
    name: str,
    reference: Callable[[Inputs], Named],
    providers: dict[str, Provider],
    least: Callable[[Case], float],
    logits: bool = False,
) -> OpSpec:
    growing = [case for case in SMALL if case["steps"] > 2]
    return OpSpec(
        name=name,
        cases=LOGITS if logits else CASES,
        small_cases=SMALL_LOGITS if logits else growing if name == "tree_grow" else SMALL,
        make_inputs=round_inputs,
        reference=reference,
        check=_all_equal,
        providers=providers,
        baseline="sgl_kernel" if "sgl_kernel" in providers else "torch",
        bytes=least,
        flops=lambda case: 0,
        axes=("batch",),
    )


_ACCEPT = {
    "ours": Provider(_ours_accept),
    "torch": Provider(_torch_accept),
    "sgl_kernel": Provider(_sgl_accept, SGL),
}

OPS = (
    _op(
        "tree_grow",
        _grow_reference,
        {
            "ours": Provider(_ours_grow),
            "torch": Provider(_torch_grow),
            "torch.compile": Provider(
                lambda i: _torch_grow(i, stock.compiled_grow_later()), needs_gpu
            ),
        },
        _grow_bytes,
    ),
    _op(
        "tree_build",
        lambda inputs: _built(inputs.built),
        {
            "ours": Provider(_ours_build),
            "torch": Provider(
                lambda i: (
                    lambda: _built(build_tree_reference(i.candidates, i.shape, i.roots, i.lens))
                )
            ),
            "sgl_kernel": Provider(_sgl_build, SGL, _check_stock_tree),
        },
        _build_bytes,
    ),
    _op("tree_accept", lambda inputs: _torch_accept(inputs)(), _ACCEPT, _accept_bytes),
    _op("tree_accept_logits", lambda i: _torch_accept(i)(), _ACCEPT, _logits_bytes, logits=True),
    _op(
        "tree_round",
        _round_reference,
        {
            "ours": Provider(ours_round),
            "sgl_kernel": Provider(sgl_round, SGL, _check_round),
            "sglang": Provider(
                lambda i: sgl_round(i, stock.compiled_grow_later()), SGL, _check_round
            ),
        },
        _round_bytes,
    ),
)
