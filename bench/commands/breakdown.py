"""``python -m bench breakdown``: where the time of a draft and verify cycle goes."""

import argparse
import dataclasses
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import torch

from bench.breakdown import eager_run, text
from bench.breakdown.eager_loop import EagerLoop
from bench.breakdown.eager_model import family_of
from bench.breakdown.parts import Split
from bench.breakdown.results import Results, earlier
from bench.breakdown.server_trace import Traced, split_file
from bench.environment import describe
from bench.serving.trace_file import TraceError
from sgl_frspec.explain import Speculation, find_device, read_model_shape
from sgl_frspec.explain.model_shape import preset_names

SWEEP = (8192, 16384, 32768, 65536, 131072, 262144)
SERVERS = ("stock", "stock:32768", "frspec:32768")
CPU_NOTE = "No GPU here: the loop runs on the CPU, and its times say nothing about a GPU."
STATUS = (
    "exit status: 0 all right, 1 parts that do not add up or a server that failed, 2 a bad request"
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
        "config",
        nargs="?",
        default="llama-3-8b",
        help=f"config.json, model folder, or one of: {', '.join(preset_names())}",
    )
    parser.add_argument("--steps", type=int, default=6, help="draft steps a cycle")
    parser.add_argument("--top-k", type=int, default=10, help="branches a step")
    parser.add_argument("--nodes", type=int, default=60, help="tokens verified a cycle")
    parser.add_argument("--batch", type=int, default=1, help="requests")
    parser.add_argument("--context", type=int, default=300, help="tokens in the cache of each")
    parser.add_argument(
        "--vocab", type=int, nargs="+", default=SWEEP, help="draft vocabularies of the eager loop"
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
    except (ValueError, TraceError, eager_run.CaptureError) as error:
        print(f"bench breakdown: {error}", file=sys.stderr)
        return 2


def _run(args: argparse.Namespace) -> int:
    _check(args)
    shape = read_model_shape(args.config)
    if args.layers:
        full = shape.full_layers * args.layers // shape.layers
        shape = dataclasses.replace(shape, layers=args.layers, full_layers=max(1, full))
    spec = Speculation(shape.vocab, args.steps, args.top_k, args.nodes, args.batch, args.context)
    on_gpu = torch.cuda.is_available()
    machine: Mapping[str, str] = describe(torch.device("cuda" if on_gpu else "cpu"))
    before: list[Split] = []
    if args.trace:
        machine = {**machine, "gpu": "the trace's GPU"}
    for folder in args.merge or ():
        machine, splits = earlier(folder)
        before += splits
    measured_on_cpu = not (on_gpu or args.trace or args.merge)
    results = Results(
        title=args.config,
        shape=shape,
        spec=spec,
        device=find_device(args.gpu),
        machine=machine,
        folder=args.out,
        note=CPU_NOTE if measured_on_cpu else "",
        predicted=not measured_on_cpu,
    )
    failures: dict[str, str] = {}
    if args.merge:
        results.add(before)
    elif args.trace:
        results.add(_from_traces(args, spec))
    else:
        if not args.no_eager:
            _eager(args, results, on_gpu)
        if args.servers is not None:
            failures = _servers(args, results)
    return _end(results, failures)


def _check(args: argparse.Namespace) -> None:
    if args.keep_traces and not args.out:
        raise ValueError("--keep-traces needs a folder: give --out")
    for name in ("cycles", "repeat"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name} is {getattr(args, name)}; it must be at least 1")
    for flag, given in (("--graphs", args.graphs), ("--servers", args.servers is not None)):
        if given and not torch.cuda.is_available():
            raise ValueError(f"{flag} needs a GPU")


def _eager(args: argparse.Namespace, results: Results, on_gpu: bool) -> None:
    if not on_gpu:
        print(CPU_NOTE)
    for vocab in args.vocab:
        if vocab < args.top_k:
            raise ValueError(f"--vocab {vocab} is smaller than --top-k {args.top_k}")
    device = torch.device("cuda" if on_gpu else "cpu")
    dtype = torch.bfloat16 if on_gpu else torch.float32
    began = time.monotonic()
    loop = EagerLoop(results.shape, family_of(args.config), results.spec, device, dtype)
    print(f"[{time.monotonic() - began:6.1f}] eager model ready", flush=True)
    traces = args.out / "traces" if args.keep_traces else None
    for vocab in list(args.vocab) * args.repeat:
        loop.set_draft_vocab(vocab)
        found = eager_run.measure(loop, args.cycles, args.graphs, traces)
        results.add(found)
        for each in found:
            print(
                f"[{time.monotonic() - began:6.1f}] {each.implementation}, V {vocab:,}: "
                f"{each.cycle_us:.0f} us a cycle, GPU busy {each.busy_us:.0f}",
                flush=True,
            )


def _servers(args: argparse.Namespace, results: Results) -> dict[str, str]:
    from bench.breakdown import server_run

    torch.cuda.empty_cache()
    name = args.config if args.config in preset_names() else Path(args.config).stem
    began = time.monotonic()
    return server_run.measure(
        f"{name}-{results.shape.layers}",
        results.shape,
        results.spec,
        [server_run.Asked.parse(text) for text in args.servers or SERVERS],
        backend=args.attention_backend,
        repeat=args.repeat,
        model_folder=args.model_folder,
        out=args.out or args.model_folder,
        start_seconds=args.start_seconds,
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


def _end(results: Results, failures: Mapping[str, str]) -> int:
    for name, why in failures.items():
        print(f"FAILED {name}: {why}", file=sys.stderr)
    if not results.splits:
        raise ValueError("nothing was measured")
    results.show()
    if results.folder:
        print(f"written to {results.folder}")
    wrong = [found for found in results.splits if not found.adds_up]
    for found in wrong:
        name = f"{found.implementation}, V {found.vocab:,}"
        print(f"WRONG {name}: {text.sums(found)}", file=sys.stderr)
    return 1 if failures or wrong else 0
