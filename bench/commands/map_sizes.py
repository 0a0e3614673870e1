"""``python -m bench map-sizes``: FRSPEC at several map sizes on the same prompts."""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch

from bench.serving.map_size_models import ServedModel, chain_model, embedded_model, model_in_folders
from bench.serving.map_size_plot import draw
from bench.serving.map_size_report import gains
from bench.serving.map_size_request import make_folder
from bench.serving.map_size_run import RESULTS, MapSizeRun
from bench.serving.one_at_a_time import starting
from bench.serving.servers import running
from bench.serving.shapes import REAL_MODEL, SHAPES
from bench.serving.variants import Tree

DESCRIPTION = (
    "Serve FRSPEC at several sizes of one map, all servers at once, and compare the fastest size"
    " with the one that `frspec choose` names from times and accept lengths of the two ends."
)
STATUS = (
    "exit status: 0 all right, 1 a server failed or a text is wrong, 2 a bad request, 3 the size"
    " that frspec choose names is more than a step of the grid from the best served one"
)
# What a file of another kind, or a damaged one, comes to.
_NO_RESULTS = (OSError, ValueError, KeyError, TypeError, AttributeError, ZeroDivisionError)


def parse_arguments(argv: list[str]) -> argparse.Namespace:
    """The command line; exits with a message where it is wrong."""
    parser = argparse.ArgumentParser(
        prog="python -m bench map-sizes", description=DESCRIPTION, epilog=STATUS
    )
    model = parser.add_argument_group("model: a shape, or folders of one and prompts")
    model.add_argument("--shape", choices=[*SHAPES, REAL_MODEL])
    model.add_argument("--layers", type=int, help="fewer or more than the shape's own")
    model.add_argument("--model-folder", type=Path, default=Path(".cache/serving"))
    model.add_argument("--target", type=Path, help="folder of the target")
    model.add_argument("--draft", type=Path, help="folder of its EAGLE-2 draft")
    model.add_argument("--map", type=Path, help="ranked map of its whole vocabulary")
    model.add_argument("--prompts", type=Path, help='JSONL: {"domain": …, "ids": [token ids]}')
    servers = parser.add_argument_group("servers")
    servers.add_argument("--sizes", nargs="+", default=["8k", "16k", "32k", "full"])
    servers.add_argument(
        "--variant", action="append", default=[], help="beside FRSPEC's, as for `bench serve`"
    )
    servers.add_argument(
        "--stock-size", action="append", default=[], help="EAGLE over the same map's first ids"
    )
    servers.add_argument("--tree", type=Tree.parse, default=Tree.parse("4x4x16"))
    servers.add_argument("--attention-backend", default="triton", help="of stock servers")
    servers.add_argument(
        "--flags", default="", help="SGLang's for all servers, one string: --flags='--dtype half'"
    )
    servers.add_argument("--start-seconds", type=float, default=240.0)
    work = parser.add_argument_group("work")
    work.add_argument("--batch", type=int, nargs="+", default=[1], help="to time rounds at")
    work.add_argument("--answer-batch", type=int, default=8, help="of the untimed answers")
    work.add_argument("--per-domain", type=int, default=20, help="prompts of a domain")
    work.add_argument("--groups", type=int, default=6, help="batches of prompts in a timed turn")
    work.add_argument("--alternations", type=int, default=5)
    work.add_argument("--tokens", type=int, default=128)
    work.add_argument("--short-tokens", type=int, default=16)
    work.add_argument("--check-text", action="store_true", help="against the target alone")
    work.add_argument("--profile", nargs="*", default=[], metavar="VARIANT")
    work.add_argument("--time-limit", type=float, metavar="SECONDS", help="begin no turn later")
    parser.add_argument("--show", type=Path, metavar="JSON", help="results, served before")
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args(argv)


def main(argv: list[str]) -> int:
    """Serve, measure, predict; the status is in ``--help``."""
    args, began = parse_arguments(argv), time.monotonic()
    if args.show:
        return _show(args.show, args.out)

    def say(line: str) -> None:
        print(f"[{time.monotonic() - began:6.1f}] {line}", flush=True)

    try:
        gpu = torch.cuda.is_available()
        run = MapSizeRun(args, _model(args), gpu, began, say)
    except ValueError as error:
        print(f"bench map-sizes: {error}")
        return 2
    with starting() as machine, running(run.variants, run.settings(), say) as fleet:
        for name, why in fleet.failures.items():
            say(f"FAILED {name}: {why}")
        machine.measure()
        status = run.measure(fleet)
    if (args.out / RESULTS).exists():
        _show(args.out / RESULTS, args.out)
    return status


def _show(file: Path, out: Path) -> int:
    try:
        make_folder(out)
    except ValueError as error:
        print(f"bench map-sizes: {error}")
        return 2
    try:
        results = json.loads(file.read_text(encoding="utf-8"))
        table = gains(results)
        if not table:
            raise ValueError("no round was timed")
        print(table)
        print(_drawn(results, out))
    except _NO_RESULTS as error:
        print(f"bench map-sizes: {file} holds no results: {type(error).__name__}: {error}")
        return 2
    return 0


def _drawn(results: dict[str, Any], out: Path) -> str:
    try:
        return f"drawn: {draw(results, out)}"
    except (ImportError, ValueError) as error:
        return f"not drawn: {error}"


def _model(args: argparse.Namespace) -> ServedModel:
    if args.shape == REAL_MODEL:
        return embedded_model(args.model_folder)
    if args.shape:
        tokens = args.tokens + args.tree.steps + 1
        return chain_model(args.model_folder, args.shape, args.layers, args.per_domain, tokens)
    if not all((args.target, args.draft, args.map, args.prompts)):
        raise ValueError("give --shape, or --target, --draft, --map and --prompts")
    return model_in_folders(args.target, args.draft, args.map, args.prompts)
