"""``--verify-text`` and ``--soak``: the embedded model's servers started, checked, reported."""

import argparse
from pathlib import Path

from bench.serving import soak as soak_run
from bench.serving.plans import make_plans
from bench.serving.scoring import generated_with_scores, rounding_bound, scored
from bench.serving.servers import Say, Server, running
from bench.serving.shapes import REAL_MODEL
from bench.serving.variants import BASES, FRSPEC, PLAIN
from bench.serving.verify_text import TextCheck, prompts

VERIFY_BATCH = 32
# Batches between these run in the graph of the next larger one.
SOAK_BATCHES = (1, 8, 32, soak_run.CONCURRENCY)
_BOUND_PROMPTS, _BOUND_TOKENS = 32, 64


def verify_text(args: argparse.Namespace, gpu: bool, began: float, say: Say) -> bool:
    """Greedy texts of every variant against the target's; whether all agree within rounding.

    Raises:
        ValueError: arguments that make no comparison.
    """
    args.variant = args.variant or list(BASES)
    args.batch = args.batch or [VERIFY_BATCH]
    plan = next(make_plans(_for_checks(args, context=700), "verify-text", gpu, began, say))
    bases = {variant.base for variant in plan.variants}
    if PLAIN not in bases or len(bases) < 2:
        raise ValueError(
            f"--verify-text compares variants that speculate with {PLAIN}: add --variant {PLAIN},"
            " or another"
        )
    texts = prompts(plan.settings.target, args.verify_text)
    check = TextCheck(plan.settings, texts, max(args.batch), say)
    right = check.run(plan.variants, args.out or Path("."), args.tokens)
    for name, why in check.failures.items():
        say(f"FAILED {name}: {why}")
    return right


def soak(args: argparse.Namespace, gpu: bool, began: float, say: Say) -> bool:
    """Mixed requests to every variant that speculates; whether none fared badly.

    Raises:
        ValueError: no variant without speculation, which judges, or none with it.
    """
    args.variant = args.variant or [PLAIN, FRSPEC]
    args.batch = args.batch or list(SOAK_BATCHES)
    args.flags += " --constrained-json-disable-any-whitespace"  # blanks without end are valid JSON
    longest = soak_run.LONGEST_PROMPT + 400
    plan = next(make_plans(_for_checks(args, context=longest), "soak", gpu, began, say))
    bases = {variant.base for variant in plan.variants}
    if PLAIN not in bases or len(bases) < 2:
        raise ValueError(f"--soak needs {PLAIN}, which judges, and a variant that speculates")
    reports = []
    with running(plan.variants, plan.settings, say) as fleet:
        judge = next((s for s in fleet.servers if s.variant.base == PLAIN), None)
        if judge is None or fleet.failures:
            return False
        bound = _bound(judge, plan.settings.target)
        say(f"two passes of the target move the gap of two logits by up to {bound:.2g}")
        for server in fleet.servers:
            if server is not judge:
                report = soak_run.Soak(server, judge, args.soak, bound, say).run()
                reports.append(report)
                say(report.text())
                soak_run.write(reports, args.out or Path("."))
    return all(report.flat and not report.faults for report in reports)


def _bound(judge: Server, model: Path) -> float:
    texts = prompts(model, _BOUND_PROMPTS)
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
