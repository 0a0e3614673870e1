"""``python -m bench tune``: time an operation's launch configurations, print rows for its table."""

import argparse
import sys

import torch

from bench import timing
from bench.checks import fail
from bench.commands.kernels import chosen_cases, unmatched_parts
from bench.environment import pick_device
from bench.op import Case, OpSpec, Tuning


def _arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench tune", description=__doc__)
    parser.add_argument(
        "--op",
        action="append",
        required=True,
        metavar="NAME",
        help="a module of bench/ops or an operation; repeatable",
    )
    parser.add_argument(
        "--case", action="append", default=[], help="only cases whose id contains this; repeatable"
    )
    parser.add_argument("--top", type=int, default=5, help="configurations to print for each case")
    parser.add_argument("--quick", action="store_true", help="fewer and shorter repetitions")
    return parser.parse_args(argv)


def main(argv: list[str]) -> int:
    """Exit status 0, 1 if an entry is broken or a capture could not be ended, 2 for a bad request.

    A configuration that gives a wrong result or fails is left out, and named on standard error.
    """
    args = _arguments(argv)
    device = pick_device()
    if device.type != "cuda":
        print("tune times launch configurations and needs a GPU", file=sys.stderr)
        return 2
    if args.top < 1:
        print(f"--top is {args.top}; give 1 or more", file=sys.stderr)
        return 2
    from bench import ops

    loaded = ops.load_or_complain(args.op)
    if loaded is None:
        return 2
    selected, broken = loaded
    unmatched = unmatched_parts(args.case, [case for op in selected for case in op.cases])
    if selected and unmatched:
        print(f"no case contains {unmatched}; bench kernels --list shows them", file=sys.stderr)
        return 2
    effort = timing.QUICK if args.quick else timing.FULL
    for op in selected:
        if op.tuning is None:
            print(f"# {op.name} has no launch configurations to tune")
            continue
        for case in chosen_cases(op, True, args.case):
            try:
                _sweep(op, op.tuning, case, device, args.top, effort)
            except timing.CaptureBrokenError as error:
                why = f"{error.provider} is not capturable in a CUDA graph: {error}"
                print(f"ERROR {op.name} {case.id}: {why}", file=sys.stderr)
                return 1
            timing.release_memory()
    return 1 if broken else 0


def _sweep(
    op: OpSpec, tuning: Tuning, case: Case, device: torch.device, top: int, effort: timing.Effort
) -> None:
    """Print the ``top`` fastest configurations of ``case`` among those that are right."""
    touched = op.bytes(case)
    copies = timing.copies_for(touched, timing.l2_bytes())
    inputs = [op.make_inputs(case, device, seed) for seed in range(copies)]
    configs = list(tuning.configs(case))
    expected = op.reference(op.make_inputs(case, device, 0))
    right = [c for c in configs if _right(op, tuning, case, device, c, expected)]
    thunks = {repr(config): [tuning.make(i, config) for i in inputs] for config in right}
    times = timing.time_interleaved(thunks, touched, effort)
    for name, took in times.items():
        if isinstance(took, str):
            print(f"# left out: {name}: {took}", file=sys.stderr)
    good = [(t.p50, name) for name, t in times.items() if isinstance(t, timing.Timing)]
    print(f"# {op.name} {case.id}: {len(good)} of {len(configs)} configurations timed")
    for us, name in sorted(good)[:top]:
        print(f"{name},  # {us:.2f} µs", flush=True)


def _right(
    op: OpSpec, tuning: Tuning, case: Case, device: torch.device, config: object, expected: object
) -> bool:
    try:
        out = tuning.make(op.make_inputs(case, device, 0), config)()
        verdict = op.check(out, expected)
    except Exception as error:  # out of registers or shared memory, mostly
        verdict = fail(f"{type(error).__name__}: {str(error)[:90]}")
    if not verdict.ok:
        print(f"# left out: {config}: {verdict.why}", file=sys.stderr)
    return verdict.ok
