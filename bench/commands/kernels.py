"""``python -m bench kernels``: check every operation, then time it beside its alternatives."""

import argparse
import math
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from bench.environment import describe, pick_device
from bench.op import Case, OpSpec

if TYPE_CHECKING:
    from bench.ops import BrokenEntry
    from bench.runner import Row

Work = Sequence[tuple[OpSpec, Case]]

NO_GPU = (
    "No GPU here: small cases under Triton's interpreter. This checks results and times nothing."
)
DESCRIPTION = "Check every operation against fp64, then time it beside its alternatives."
STATUS = "exit status: 0 all right, 1 a wrong result or an error, 2 a bad request, 3 out of time"


def _arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench kernels", description=DESCRIPTION, epilog=STATUS
    )
    parser.add_argument(
        "--op",
        action="append",
        default=[],
        metavar="NAME",
        help="a module of bench/ops or an operation; repeatable (default: all)",
    )
    parser.add_argument(
        "--case", action="append", default=[], help="only cases whose id contains this; repeatable"
    )
    parser.add_argument("--provider", action="append", default=[], help="only this one; repeatable")
    parser.add_argument("--out", type=Path, help="folder for CSV, JSON, Markdown and plots")
    parser.add_argument("--list", action="store_true", help="show operations, cases, providers")
    parser.add_argument(
        "--quick", action="store_true", help="fewer and shorter repetitions, medians all the same"
    )
    parser.add_argument(
        "--time-limit",
        type=float,
        metavar="SECONDS",
        help="begin no case later than this; operations take turns, so that each gets some",
    )
    return parser.parse_args(argv)


def chosen_cases(op: OpSpec, on_gpu: bool, parts: Sequence[str]) -> list[Case]:
    """The operation's cases for this device whose id contains one of ``parts``; all if none."""
    cases = op.cases if on_gpu else op.small_cases
    return [case for case in cases if any(part in case.id for part in parts or ("",))]


def unmatched_parts(parts: Sequence[str], cases: Sequence[Case]) -> str:
    """Those of ``parts`` that no id of ``cases`` contains, in words; empty if there are none."""
    return " or ".join(part for part in parts if not any(part in case.id for case in cases))


def main(argv: list[str]) -> int:
    """Check and time what ``argv`` asks for; the status is in ``--help``."""
    args = _arguments(argv)
    device = pick_device()
    from bench import ops  # entries import triton, which pick_device prepares

    loaded = ops.load_or_complain(args.op)
    if loaded is None:
        return 2
    selected, broken = loaded
    if args.list:
        return _list(selected, broken)
    work = _work(selected, device.type == "cuda", args.case, args.time_limit is not None)
    complaint = _complaint(work, args, broken) or (_unwritable(args.out) if args.out else "")
    if complaint:
        print(complaint, file=sys.stderr)
        return 2
    return _run(work, device, args, broken)


def _work(selected: Sequence[OpSpec], on_gpu: bool, parts: Sequence[str], take_turns: bool) -> Work:
    """Cases of the operations, one operation after the other or in turns."""
    by_op = [[(op, case) for case in chosen_cases(op, on_gpu, parts)] for op in selected]
    if not take_turns:
        return list(chain.from_iterable(by_op))
    return [item for turn in zip_longest(*by_op) for item in turn if item is not None]


def _complaint(work: Work, args: argparse.Namespace, broken: Sequence["BrokenEntry"]) -> str:
    known = {name for op, _ in work for name in op.providers}
    if args.time_limit is not None and not args.time_limit >= 0:
        return f"--time-limit is {args.time_limit}; give seconds, 0 or more"
    unmatched = unmatched_parts(args.case, [case for _, case in work])
    if unmatched and not broken:
        return f"no case contains {unmatched}; --list shows them"
    if not work:
        return ""
    unknown = set(args.provider) - known
    return f"no provider {sorted(unknown)}; there are: {sorted(known)}" if unknown else ""


def _unwritable(folder: Path) -> str:
    """Why no file can be made in ``folder``: better known before a run than after it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return ""
    except OSError as error:
        return f"cannot write to --out {folder}: {error.strerror}; give another folder"


def _list(selected: Sequence[OpSpec], broken: Sequence["BrokenEntry"]) -> int:
    for op in selected:
        print(f"{op.name}\n  providers: {', '.join(op.providers)} (baseline {op.baseline})")
        print("  cases:", *(case.id for case in op.cases))
        print("  cases without a GPU:", *(case.id for case in op.small_cases))
    return 1 if broken else 0


class _Here:
    """Runs the cases in this process: under the interpreter nothing can break but Python."""

    def __init__(
        self, work: Work, device: torch.device, providers: Sequence[str], seconds: float | None
    ) -> None:
        self.machine, self.undone = describe(device), len(work)
        self._work, self._device, self._providers = work, device, providers
        self._until = math.inf if seconds is None else time.monotonic() + seconds

    def results(self) -> Iterator[list["Row"]]:
        from bench.runner import CaseRun

        for op, case in self._work:
            if time.monotonic() >= self._until:
                return
            yield CaseRun(op, case, self._device, self._providers).rows()
            self.undone -= 1


def _run(
    work: Work,
    device: torch.device,
    args: argparse.Namespace,
    broken: Sequence["BrokenEntry"],
) -> int:
    """Check and time ``work``, print the table, write the files after each case."""
    from bench import report
    from bench.supervisor import Supervisor, WorkerFailedError

    if device.type == "cuda":
        runs = Supervisor(work, args.op, args.provider, args.quick, args.time_limit)
    else:
        print(NO_GPU)
        runs = _Here(work, device, args.provider, args.time_limit)
    names = [(op.name, case.id, name) for op, case in work for name in op.providers]
    table, rows = report.Table(names, timed=device.type == "cuda"), []
    try:
        for of_case in runs.results():
            rows += of_case
            for row in of_case:
                if row.status != "absent":
                    table.add(row)
            if args.out:
                report.write(rows, runs.machine, args.out, "kernels")
    except WorkerFailedError as error:
        print(f"the worker process does not start: {error}", file=sys.stderr)
        return 1
    print(" · ".join(f"{k} {v}" for k, v in runs.machine.items()))
    if args.out:
        _draw(work, rows, args.out, runs.machine)
    return _summary(rows, runs.undone, broken)


def _draw(work: Work, rows: Sequence["Row"], out: Path, machine: Mapping[str, str]) -> None:
    from bench import plots, report

    (out / "kernels.md").write_text(report.markdown(rows, machine))
    for op in {op.name: op for op, _ in work}.values():
        plots.draw(op, [case for o, case in work if o is op], rows, out)
    print(f"written to {out}")


def _summary(rows: Sequence["Row"], undone: int, broken: Sequence["BrokenEntry"]) -> int:
    from bench.report import absences

    red = [row for row in rows if row.red]
    ran = sum(row.status != "absent" for row in rows)
    for absence in absences(rows):
        print(f"absent: {absence}")
    print(f"{ran - len(red)} of {ran} results right")
    for row in red:
        print(f"{row.status} {row.op} {row.case} {row.provider}: {row.note}", file=sys.stderr)
    for entry in broken:
        print(f"ERROR bench/ops/{entry.stem}.py: {entry.why}", file=sys.stderr)
    if undone:
        print(f"{undone} cases not run: time limit", file=sys.stderr)
    if red or broken:
        return 1
    if undone:
        return 3
    if not ran:
        print("nothing was checked: every chosen provider is absent", file=sys.stderr)
        return 2
    return 0
