"""``python -m bench cross-compile``: compile every shipped kernel for GPUs that are not here.

Needs no GPU. Fails when a kernel does not compile for a target, when it spills registers or asks
for too much shared memory on sm_90, and when a kernel's module lists no configuration of it.
Spills and shared memory elsewhere are reported. Compiled kernels are kept in
.cache/cross_compile, so a second run compiles what has changed.
"""

import argparse
import multiprocessing
import os
import sys
from collections import defaultdict
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import TYPE_CHECKING

from tqdm import tqdm

if TYPE_CHECKING:
    from bench.cross_compile import Outcome

STRICT = ("sm_90",)
CACHE = Path(".cache/cross_compile")
WORKERS = 2


def _arguments(argv: list[str], targets: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench cross-compile",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--module",
        action="append",
        default=[],
        help="module with compile_specs(), such as frspec_kernels.norm_launch; repeatable "
        "(default: all of frspec_kernels)",
    )
    parser.add_argument(
        "--target", action="append", choices=targets, help="repeatable (default: all)"
    )
    parser.add_argument(
        "--all", action="store_true", help="show every configuration, not one line a kernel"
    )
    return parser.parse_args(argv)


def main(argv: list[str]) -> int:
    """Exit status 0, or 1 when a kernel does not compile or spills where it must not."""
    os.environ.pop("TRITON_INTERPRET", None)  # read when triton is imported, below
    os.environ.setdefault("TRITON_CACHE_DIR", str(CACHE.absolute()))
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # today's default, without a warning
    import frspec_kernels
    from bench import cross_compile, shipped_kernels

    args = _arguments(argv, list(cross_compile.TARGETS))
    modules = args.module or shipped_kernels.modules_with_specs(frspec_kernels)
    specs = shipped_kernels.specs_of(modules)
    targets = args.target or list(cross_compile.TARGETS)
    jobs = [(module, key, target) for key, (module, _) in specs.items() for target in targets]
    outcomes = _compile_all(jobs)
    (_print_each if args.all else _print_kernels)(outcomes, targets)
    forgotten = [] if args.module else shipped_kernels.kernels_without_specs(frspec_kernels)
    return _judge(outcomes, forgotten)


def _compile_all(jobs: list[tuple[str, tuple[str, str], str]]) -> "list[Outcome]":
    """Outcomes in the jobs' order, from two processes (triton keeps global state)."""
    from bench.cross_compile import compile_named

    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(WORKERS, mp_context=context) as pool:
        futures = [pool.submit(compile_named, *job) for job in jobs]
        pause = 0.1 if sys.stderr.isatty() else 10.0  # seconds; a log gets a few lines
        with tqdm(total=len(jobs), unit="kernel", desc="compiling", mininterval=pause) as bar:
            for _ in as_completed(futures):
                bar.update()
        return [future.result() for future in futures]


def _cell(outcome: "Outcome") -> str:
    if outcome.unsupported:
        return outcome.unsupported
    if outcome.error:
        return "ERROR"
    spilled = f"+{outcome.spill_bytes}B" if outcome.spill_bytes else ""
    return f"{outcome.registers}{spilled}"


def _print_each(outcomes: "list[Outcome]", targets: list[str]) -> None:
    rows: dict[tuple[str, str], dict[str, str]] = defaultdict(dict)
    for outcome in outcomes:
        rows[outcome.kernel, outcome.config][outcome.target] = _cell(outcome)
    _table(
        ["kernel", *targets, "configuration"],
        [[k, *(cells[t] for t in targets), c] for (k, c), cells in rows.items()],
    )


def _print_kernels(outcomes: "list[Outcome]", targets: list[str]) -> None:
    """One line a kernel: configurations, and the widest one's registers and spills."""
    groups: dict[str, list[Outcome]] = defaultdict(list)
    for outcome in outcomes:
        groups[outcome.kernel].append(outcome)
    rows = []
    for kernel, group in groups.items():
        worst = []
        for target in targets:
            here = [o for o in group if o.target == target and not o.unsupported]
            top = max(here, key=lambda o: (bool(o.error), o.spill_bytes, o.registers), default=None)
            worst.append(_cell(top) if top else "none")
        rows.append([kernel, str(len({o.config for o in group})), *worst])
    _table(["kernel", "configurations", *targets], rows)


def _table(header: list[str], rows: list[list[str]]) -> None:
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    for row in (header, ["-" * width for width in widths], *rows):
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        print("  ".join(cells).rstrip())
    print("registers a thread, +bytes spilled; the widest of a kernel's configurations\n")


def _judge(outcomes: "list[Outcome]", forgotten: list[str]) -> int:
    errors = [o for o in outcomes if o.error]
    wasteful = [o for o in outcomes if o.spill_bytes or o.excess_shared]
    fatal = [o for o in wasteful if o.target in STRICT]
    for o in wasteful:
        spills = f"spills {o.spill_bytes} B " if o.spill_bytes else ""
        shared = f"shared memory {o.excess_shared} B over the limit " if o.excess_shared else ""
        print(f"{'FAIL ' * (o in fatal)}{spills}{shared}on {o.target}: {o.kernel} {o.config}")
    for o in errors:
        print(f"FAIL does not compile for {o.target}: {o.kernel} {o.config}\n  {o.error}")
    for kernel in forgotten:
        print(f"FAIL {kernel} is in no compile_specs(): list what is shipped of it")
    skipped = sum(bool(o.unsupported) for o in outcomes)
    print(
        f"{len(outcomes) - skipped - len(errors)} compiled, {skipped} left out for want of a type, "
        f"{len(errors)} errors, {len(fatal)} too large for {', '.join(STRICT)}, "
        f"{len(wasteful) - len(fatal)} elsewhere, {len(forgotten)} kernels without configurations"
    )
    return 1 if errors or fatal or forgotten or not outcomes else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
