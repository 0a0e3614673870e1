"""``--verify-text`` and ``--soak``: the embedded model's servers started, checked, reported."""

import argparse
from pathlib import Path

from bench.serving import soak as soak_run
from bench.serving.plans import make_plans
from bench.serving.scoring import generated_with_scores, rounding_bound, scored
from bench.serving.servers import Fleet, Say, Server, running
from bench.serving.shapes import REAL_MODEL
from bench.serving.variants import BASES, FRSPEC, PLAIN, parse_variants
from bench.serving.verify_text import TextCheck, prompts

# Batches between these run in the graph of the next larger one; the last is sent at once.
BATCHES = (1, 8, 32, soak_run.CONCURRENCY)
_TEXT_CONTEXT, _SOAK_CONTEXT = 700, soak_run.LONGEST_PROMPT + 400
# The bound is a largest value, so it needs about as many tokens as will be held against it: a soak
# of 2,000 requests has some 50,000 scored.
_LEAST_BOUND_PROMPTS, _MOST_BOUND_PROMPTS, _BOUND_TOKENS = 32, 512, 64


def check_answers(args: argparse.Namespace, gpu: bool, began: float, say: Say) -> bool:
    """The checks that ``args`` names, on one set of servers; whether all fared well.

    Raises:
        ValueError: no variant without speculation, which judges, or none with it.
    """
    asked = [name for name in ("verify_text", "soak") if getattr(args, name)]
    args.variant = args.variant or (list(BASES) if args.verify_text else [PLAIN, FRSPEC])
    args.batch = args.batch or list(BATCHES)
    if args.soak:
        args.flags += " --constrained-json-disable-any-whitespace"  # endless blanks are valid JSON
    bases = {variant.base for variant in parse_variants(args.variant)}
    if PLAIN not in bases or len(bases) < 2:
        flags = " and ".join(f"--{name.replace('_', '-')}" for name in asked)
        raise ValueError(
            f"{flags}: give {PLAIN}, which judges, and a variant that speculates, not only"
            f" {', '.join(sorted(bases))}"
        )
    context = _SOAK_CONTEXT if args.soak else _TEXT_CONTEXT
    plan = next(make_plans(_for_checks(args, context), "-".join(asked), gpu, began, say))
    out, model = args.out or Path("."), plan.settings.target
    with running(plan.variants, plan.settings, say) as fleet:
        for name, why in fleet.failures.items():
            say(f"FAILED {name}: {why}")
        judge = next((s for s in fleet.servers if s.variant.base == PLAIN), None)
        if judge is None:
            return False
        right, bound = not fleet.failures, None
        if args.verify_text:
            check = TextCheck(prompts(model, args.verify_text), max(args.batch), say)
            right &= check.run(fleet.servers, judge, out, args.tokens)
            bound = check.bound
        if args.soak:
            right &= _soak(fleet, judge, model, bound, args, plan.deadline, say)
    return right


def _soak(
    fleet: Fleet,
    judge: Server,
    model: Path,
    bound: float | None,
    args: argparse.Namespace,
    deadline: float,
    say: Say,
) -> bool:
    """Mixed requests to FRSPEC's servers, or where there are none to those that speculate."""
    if bound is None:
        bound = _bound(judge, model, args.soak)
        say(f"two passes of the target move the gap of two logits by up to {bound:.2g}")
    speculating = [server for server in fleet.servers if server.variant.speculates]
    ours = [server for server in speculating if server.variant.base == FRSPEC]
    reports: list[soak_run.SoakReport] = []
    for server in ours or speculating:
        reports.append(soak_run.Soak(server, judge, args.soak, bound, say, deadline).run())
        say(reports[-1].text())
        soak_run.write(reports, args.out or Path("."))
    return bool(reports) and all(report.good for report in reports)


def _bound(judge: Server, model: Path, requests: int) -> float:
    count = min(max(requests // 4, _LEAST_BOUND_PROMPTS), _MOST_BOUND_PROMPTS)
    texts = prompts(model, count)
    decoded = generated_with_scores(judge.url, texts, _BOUND_TOKENS)
    pairs = [
        (text, [score.token for score in scores])
        for text, scores in zip(texts, decoded, strict=True)
    ]
    return rounding_bound(decoded, scored(judge.url, pairs))


def _for_checks(args: argparse.Namespace, context: int) -> argparse.Namespace:
    """The arguments, with the embedded model and room for ``context`` tokens a request."""
    fixed = {"shape": REAL_MODEL, "layers": None, "profile": "none", "context": [context]}
    return argparse.Namespace(**vars(args) | fixed)
