"""``python -m bench serve``: real servers beside each other, without and with speculation."""

import argparse
import datetime
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from bench.environment import describe
from bench.serving import table
from bench.serving.measure import LEAST_TIMES_SHORT
from bench.serving.rows import Row, read, write
from bench.serving.shapes import REAL_MODEL, SHAPES
from bench.serving.variants import BASES

DESCRIPTION = "Start SGLang servers that differ in how they draft, and compare their decode rounds."
STATUS = (
    "exit status: 0 all right, 1 a wrong answer or a server that failed, 2 a bad request,"
    " 3 workloads left out"
)
CPU_NOTE = "No GPU here: the CPU engine. Answers are checked; its times mean nothing."


def _arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench serve", description=DESCRIPTION, epilog=STATUS
    )
    model = parser.add_argument_group("model")
    model.add_argument("--shape", default="8b", choices=[*SHAPES, REAL_MODEL])
    model.add_argument("--layers", type=int, help="fewer or more than the shape's own")
    model.add_argument("--model-folder", type=Path, default=Path(".cache/serving"))
    servers = parser.add_argument_group("servers")
    servers.add_argument(
        "--variant",
        action="append",
        default=[],
        metavar="[NAME=]BASE[@BACKEND] [FLAGS]",
        help=f"repeatable; BASE is one of {', '.join(BASES)} (default: all four)",
    )
    servers.add_argument("--tree", action="append", default=[], help="as 3x4x16; repeatable")
    servers.add_argument(
        "--attention-backend",
        default="triton",
        help="where a variant names none; FRSPEC's own for FRSPEC",
    )
    servers.add_argument("--flags", default="", help="SGLang flags for all servers, in one string")
    servers.add_argument("--device", choices=["gpu", "cpu"], help="default: what there is")
    servers.add_argument("--place", choices=["side-by-side", "in-turn"], default="side-by-side")
    servers.add_argument("--start", choices=["together", "apart"], default="together")
    servers.add_argument("--start-seconds", type=float, default=240.0)
    work = parser.add_argument_group("workloads")
    work.add_argument("--batch", type=int, nargs="+", help="default: 1; for checks up to 64")
    work.add_argument("--context", type=int, nargs="+", default=[300])
    work.add_argument(
        "--workload",
        nargs="+",
        default=[],
        metavar="BATCHxCONTEXT",
        help="in this order, instead of every --batch with every --context",
    )
    work.add_argument("--alternations", type=int, default=5)
    work.add_argument("--tokens", type=int, default=256, help="generated for each request")
    work.add_argument("--short-tokens", type=int, default=32, help="generated for the difference")
    work.add_argument(
        "--sample-seconds",
        type=float,
        default=float("inf"),
        help="fewer tokens of a server whose rounds take longer than this, but at least"
        f" {LEAST_TIMES_SHORT} times --short-tokens",
    )
    work.add_argument("--profile", choices=["none", "first", "all"], default="first")
    work.add_argument("--time-limit", type=float, metavar="SECONDS", help="begin nothing later")
    checks = parser.add_argument_group("checks of answers, with the embedded model")
    checks.add_argument(
        "--verify-text",
        type=int,
        nargs="?",
        const=200,
        metavar="PROMPTS",
        help="compare greedy texts of --tokens tokens with those without speculation",
    )
    checks.add_argument(
        "--soak",
        type=int,
        nargs="?",
        const=2000,
        metavar="REQUESTS",
        help="mixed requests, 64 at a time: none lost, none wrong, memory flat",
    )
    files = parser.add_argument_group("results")
    files.add_argument("--out", type=Path, help="folder for JSON, CSV, Markdown, plot and logs")
    files.add_argument("--merge", type=Path, nargs="+", help="show earlier runs' folders as one")
    return parser.parse_args(argv)


def main(argv: list[str]) -> int:
    """Run what ``argv`` asks for; the status is in ``--help``."""
    args = _arguments(argv)
    try:
        if args.merge:
            return _merge(args)
        if args.verify_text or args.soak:
            return _check_answers(args)
        return _compare(args)
    except ValueError as error:
        print(f"bench serve: {error}", file=sys.stderr)
        return 2


class Clock:
    """Prints lines with the seconds since the start."""

    def __init__(self) -> None:
        self.began = time.monotonic()

    def say(self, line: str) -> None:
        """Print ``line``."""
        print(f"[{time.monotonic() - self.began:6.1f}] {line}", flush=True)


def _merge(args: argparse.Namespace) -> int:
    rows, machine = read(args.merge)
    for case in table.cases(rows):
        print(table.text(case), end="\n\n")
    _finish(rows, machine, args.out)
    return 0


def _finish(rows: Sequence[Row], machine: dict[str, str], out: Path | None) -> None:
    print(table.servers(rows))
    print(" · ".join(f"{key} {value}" for key, value in machine.items()), flush=True)
    if out and rows:
        from bench.serving import plot

        write(rows, machine, out)
        (out / "serve.md").write_text(table.markdown(rows))
        try:
            print(f"written to {out}, {plot.draw(rows, out).name} too")
        except ImportError as error:
            print(f"written to {out}, without a plot: {error}")


def _check_answers(args: argparse.Namespace) -> int:
    from bench.serving.answer_checks import check_answers

    clock, on_gpu = Clock(), _on_gpu(args)
    return 0 if check_answers(args, on_gpu, clock.began, clock.say) else 1


def _on_gpu(args: argparse.Namespace) -> bool:
    on_gpu = torch.cuda.is_available() if args.device is None else args.device == "gpu"
    if not on_gpu:
        print(CPU_NOTE)
    return on_gpu


def _compare(args: argparse.Namespace) -> int:
    from bench.serving.comparison import Comparison
    from bench.serving.plans import make_plans

    clock, on_gpu = Clock(), _on_gpu(args)
    machine = describe(torch.device("cuda" if on_gpu else "cpu"))
    run = datetime.datetime.now(datetime.UTC).strftime("%Y%m%d-%H%M%S")
    found: dict[tuple, list[Row]] = {}
    failures: dict[str, str] = {}
    undone = 0
    for plan in make_plans(args, run, on_gpu, clock.began, clock.say):
        comparison = Comparison(plan, clock.say)
        for case in comparison.cases():
            found[case[0].case] = case
            clock.say(table.text(case))
            if args.out:
                write(_all(found), machine, args.out)
        failures |= {
            f"{name}, {plan.settings.tree}": why for name, why in comparison.failures.items()
        }
        undone += len(comparison.undone)
    rows = _all(found)
    _finish(rows, machine, args.out)
    return _status(rows, failures, undone)


def _all(found: Mapping[tuple, Sequence[Row]]) -> list[Row]:
    return [row for case in found.values() for row in case]


def _status(rows: Sequence[Row], failures: dict[str, str], undone: int) -> int:
    for name, why in failures.items():
        print(f"FAILED {name}: {why}", file=sys.stderr)
    wrong = [row for row in rows if row.wrong]
    for row in wrong:
        print(f"WRONG {row.variant}, {table.title(row)}: {row.wrong}", file=sys.stderr)
    if failures or wrong or not rows:
        return 1
    if undone:
        print(f"{undone} workloads left out", file=sys.stderr)
    return 3 if undone else 0
