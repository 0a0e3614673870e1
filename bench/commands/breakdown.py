"""``python -m bench breakdown``: where the time of a draft and verify cycle goes."""

import argparse
import dataclasses
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from bench.breakdown import eager_models, text
from bench.breakdown.eager_labels import CaptureError
from bench.breakdown.parts import Split
from bench.breakdown.results import Results, earlier
from bench.breakdown.server_trace import Traced, split_file
from bench.environment import describe
from bench.serving.trace_file import TraceError
from sgl_frspec.explain import Speculation, find_device, read_model_shape
from sgl_frspec.explain.model_shape import preset_names

SWEEP = ("8192", "16384", "32768", "65536", "131072", "262144", "full")
SERVERS = ("stock", "stock:32768", "frspec:32768")
CPU_NOTE = "No GPU here: the loop runs on the CPU, and its times say nothing about a GPU."
STATUS = (
    "exit status: 0 all right, 1 parts that do not add up, kernels of a wrong part or a server "
    "that failed, 2 a bad request"
)


def _arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench breakdown",
        description="Split draft, verification and cycle into parts and GPU idle time: a plain "
        "eager PyTorch loop, and SGLang servers, stock and FRSPEC.",
        epilog=STATUS,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "configs",
        nargs="*",
        default=["llama-3-8b"],
        metavar="CONFIG",
        help=f"config.json, model folder, or one of: {', '.join(preset_names())}; of several, "
        "each has a folder of its own in --out",
    )
    parser.add_argument("--steps", type=int, default=6, help="draft steps a cycle")
    parser.add_argument("--top-k", type=int, default=10, help="branches a step")
    parser.add_argument("--nodes", type=int, default=60, help="tokens verified a cycle")
    parser.add_argument("--batch", type=int, default=1, help="requests")
    parser.add_argument("--context", type=int, default=300, help="tokens in the cache of each")
    parser.add_argument(
        "--vocab",
        nargs="+",
        default=SWEEP,
        metavar="V",
        help="draft vocabularies of the eager loop, full being the model's own; one that stands "
        "there twice is measured twice",
    )
    parser.add_argument("--layers", type=int, help="of the target, instead of the model's own")
    parser.add_argument("--cycles", type=int, default=20, help="timed for each")
    parser.add_argument("--repeat", type=int, default=1, help="measure everything so often")
    parser.add_argument("--no-eager", action="store_true", help="leave the eager loop out")
    parser.add_argument("--graphs", action="store_true", help="the eager loop as a CUDA graph too")
    parser.add_argument("--gpu", default="h200", help="whose reachable rates predictions take")
    servers = parser.add_argument_group("servers")
    servers.add_argument(
        "--servers",
        nargs="*",
        metavar="NAME[:V]",
        help="start SGLang servers: stock, stock:V with a map of V ids, frspec:V; "
        f"alone it means {' '.join(SERVERS)}",
    )
    servers.add_argument("--attention-backend", default="triton")
    servers.add_argument("--model-folder", type=Path, default=Path(".cache/serving"))
    servers.add_argument("--start-seconds", type=float, default=240.0)
    servers.add_argument(
        "--time-limit", type=float, default=float("inf"), metavar="SECONDS", help="trace none later"
    )
    servers.add_argument(
        "--trace",
        action="append",
        default=[],
        metavar="NAME:V[:US]=FILE",
        help="split a trace that a server wrote, where a cycle takes US microseconds untraced; "
        "without US its traced length stands for it",
    )
    files = parser.add_argument_group("results")
    files.add_argument("--out", type=Path, help="folder for breakdown.json and breakdown.html")
    files.add_argument("--keep-traces", action="store_true", help="in --out, for Perfetto")
    files.add_argument("--merge", type=Path, nargs="+", help="show earlier runs' folders as one")
    return parser.parse_args(argv)


def main(argv: list[str]) -> int:
    """Measure what ``argv`` asks for; the status is in ``--help``."""
    args = _arguments(argv)
    try:
        return _run(args)
    except (ValueError, TraceError, CaptureError) as error:
        print(f"bench breakdown: {error}", file=sys.stderr)
        return 2


def _run(args: argparse.Namespace) -> int:
    _check(args)
    runs = [_results(args, config) for config in args.configs]
    if args.merge:
        return _merged(args, runs[0])
    if args.trace:
        runs[0].add(_from_traces(args, runs[0].spec))
        return _end(runs, {})
    if not args.no_eager:
        if not torch.cuda.is_available():
            print(CPU_NOTE)
        vocabs = list(args.vocab) * args.repeat
        eager_models.measure(runs, vocabs, args.cycles, args.graphs, args.keep_traces)
    failures = {}
    if args.servers is not None:
        for results in runs:
            failures |= _servers(args, results)
    return _end(runs, failures)


def _results(args: argparse.Namespace, config: str) -> Results:
    shape = read_model_shape(config)
    if args.layers:
        full = shape.full_layers * args.layers // shape.layers
        shape = dataclasses.replace(shape, layers=args.layers, full_layers=max(1, full))
    spec = Speculation(shape.vocab, args.steps, args.top_k, args.nodes, args.batch, args.context)
    on_gpu = torch.cuda.is_available()
    machine: Mapping[str, str] = describe(torch.device("cuda" if on_gpu else "cpu"))
    if args.trace:
        machine = {**machine, "gpu": "the trace's GPU"}
    title = config if config in preset_names() else Path(config).stem
    times_count = on_gpu or bool(args.trace or args.merge)
    return Results(
        title=title,
        shape=shape,
        spec=spec,
        device=find_device(args.gpu),
        machine=machine,
        folder=args.out / title if args.out and len(args.configs) > 1 else args.out,
        note="" if times_count else CPU_NOTE,
        predicted=times_count,
    )


def _merged(args: argparse.Namespace, results: Results) -> int:
    for folder in args.merge:
        run = earlier(folder)
        results.machine = run.machine
        if run.settings != results.settings:
            raise ValueError(
                f"--merge {folder}: it was measured with {run.settings}; this command says "
                f"{results.settings}. Give the model and options of that run"
            )
        results.add(run.splits)
    return _end([results], {})


def _check(args: argparse.Namespace) -> None:
    if args.keep_traces and not args.out:
        raise ValueError("--keep-traces needs a folder: give --out")
    if len(args.configs) > 1 and (args.merge or args.trace):
        raise ValueError(f"--merge and --trace are about one model, not {len(args.configs)}")
    for name in ("cycles", "repeat"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name} is {getattr(args, name)}; it must be at least 1")
    for flag, given in (("--graphs", args.graphs), ("--servers", args.servers is not None)):
        if given and not torch.cuda.is_available():
            raise ValueError(f"{flag} needs a GPU")


def _servers(args: argparse.Namespace, results: Results) -> dict[str, str]:
    from bench.breakdown import server_run

    torch.cuda.empty_cache()
    began = time.monotonic()
    return server_run.measure(
        f"{results.title}-{results.shape.layers}",
        results.shape,
        results.spec,
        [server_run.Asked.parse(text) for text in args.servers or SERVERS],
        backend=args.attention_backend,
        repeat=args.repeat,
        model_folder=args.model_folder,
        out=results.folder or args.model_folder,
        start_seconds=args.start_seconds,
        time_limit=args.time_limit,
        keep_traces=args.keep_traces,
        say=lambda line: print(f"[{time.monotonic() - began:6.1f}] {line}", flush=True),
        found=results.add,
    )


def _from_traces(args: argparse.Namespace, spec: Speculation) -> list[Split]:
    splits = []
    for given in args.trace:
        label, equals, path = given.partition("=")
        name, _, rest = label.partition(":")
        vocab, colon, us = rest.partition(":")
        if not (equals and name and vocab.isdigit() and (not colon or us.isdigit())):
            raise ValueError(
                f"--trace {given!r}: write NAME:V[:US]=FILE, as frspec:32768=t.json.gz"
            )
        if not Path(path).is_file():
            raise ValueError(f"--trace {given!r}: there is no file {path}")
        cycle_us = float(us) if colon else None
        traced = Traced(Path(path), name, int(vocab), spec.steps, cycle_us)
        splits.append(split_file(traced))
    return splits


def _end(runs: Sequence[Results], failures: Mapping[str, str]) -> int:
    for name, why in failures.items():
        print(f"FAILED {name}: {why}", file=sys.stderr)
    if not any(results.splits for results in runs):
        raise ValueError("nothing was measured")
    wrong = False
    for results in runs:
        results.show()
        if results.folder:
            print(f"written to {results.folder}", end="\n\n")
        for found in results.splits:
            for reason in text.faults(found):
                wrong = True
                name = f"{results.title}, {found.implementation}, V {found.vocab:,}"
                print(f"WRONG {name}: {reason}", file=sys.stderr)
    return 1 if failures or wrong else 0
