"""``python -m bench kernels``: check every operation, then time it beside its alternatives."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from bench.environment import describe, pick_device
from bench.op import Case, OpSpec

if TYPE_CHECKING:
    from bench.runner import Row

Work = Sequence[tuple[OpSpec, Case]]

NO_GPU = (
    "No GPU here: small cases under Triton's interpreter. This checks results and times nothing."
)


def _arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench kernels", description=__doc__)
    parser.add_argument("--op", help="a module of bench/ops or an operation (default: all)")
    parser.add_argument("--case", default="", help="only cases whose id contains this")
    parser.add_argument("--provider", action="append", default=[], help="only this one; repeatable")
    parser.add_argument("--out", type=Path, help="folder for CSV, JSON, Markdown and plots")
    parser.add_argument("--list", action="store_true", help="show operations, cases, providers")
    return parser.parse_args(argv)


def chosen_cases(op: OpSpec, on_gpu: bool, part: str) -> list[Case]:
    """The operation's cases for this device whose id contains ``part``."""
    return [case for case in (op.cases if on_gpu else op.small_cases) if part in case.id]


def main(argv: list[str]) -> int:
    """Exit status 0 if every provider that ran is right, 1 if one is not, 2 for a bad request."""
    args = _arguments(argv)
    device = pick_device()
    from bench import ops  # entries import triton, which pick_device prepares

    try:
        selected = ops.load(args.op)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    if args.list:
        return _list(selected)
    work = [(op, c) for op in selected for c in chosen_cases(op, device.type == "cuda", args.case)]
    known = {name for op, _ in work for name in op.providers}
    if unknown := set(args.provider) - known:
        print(f"no provider {sorted(unknown)}; there are: {sorted(known)}", file=sys.stderr)
        return 2
    if not work:
        print(f"no case contains {args.case!r}; --list shows them", file=sys.stderr)
        return 2
    return run(work, device, args.provider, args.out)


def _list(selected: Sequence[OpSpec]) -> int:
    for op in selected:
        print(f"{op.name}\n  providers: {', '.join(op.providers)} (baseline {op.baseline})")
        print("  cases:", *(case.id for case in op.cases))
        print("  cases without a GPU:", *(case.id for case in op.small_cases))
    return 0


def run(work: Work, device: torch.device, providers: Sequence[str], out: Path | None) -> int:
    """Check and time ``work``, print the table, write the files after each case."""
    from bench import report
    from bench.runner import run_case

    machine = _announce(device)
    names = [(op.name, case.id, name) for op, case in work for name in op.providers]
    table, rows = report.Table(names), []
    for number, (op, case) in enumerate(work, 1):
        print(f"[{number}/{len(work)}] {op.name} {case.id}", file=sys.stderr, flush=True)
        for row in run_case(op, case, device, providers):
            table.add(row)
            rows.append(row)
        if out:
            report.write(rows, machine, out, "kernels")
    if out:
        _draw(work, rows, out)
    return _summary(rows)


def _announce(device: torch.device) -> dict[str, str]:
    """Print what the run is measured on, and return it with the measured peaks."""
    from bench import roofline

    machine = describe(device)
    if device.type == "cuda":
        peaks = roofline.measure()
        machine["copy_gb_s"] = f"{peaks.bytes_per_s / 1e9:.0f}"
        machine["bf16_tflop_s"] = f"{peaks.flops_per_s / 1e12:.0f}"
    print(" · ".join(f"{k} {v}" for k, v in machine.items()))
    if device.type != "cuda":
        print(NO_GPU)
    return machine


def _draw(work: Work, rows: Sequence["Row"], out: Path) -> None:
    from bench import plots, report

    (out / "kernels.md").write_text(report.markdown(rows))
    for op in {op.name: op for op, _ in work}.values():
        plots.draw(op, [case for o, case in work if o is op], rows, out)
    print(f"written to {out}")


def _summary(rows: Sequence["Row"]) -> int:
    red = [row for row in rows if row.red]
    ran = sum(row.status != "absent" for row in rows)
    print(f"{ran - len(red)} of {ran} results right, {len(rows) - ran} providers absent")
    for row in red:
        print(f"{row.status} {row.op} {row.case} {row.provider}: {row.note}", file=sys.stderr)
    return 1 if red else 0
