"""``python -m bench breakdown``: where the time of a draft and verify cycle goes."""

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from bench.breakdown import eager_run, page, text
from bench.breakdown.eager_loop import EagerLoop
from bench.breakdown.eager_model import family_of
from bench.breakdown.parts import Split, from_json
from bench.breakdown.predict import with_prediction
from bench.breakdown.server_trace import TraceError, read_events, split
from bench.environment import describe
from sgl_frspec.explain import Device, ModelShape, Speculation, find_device, read_model_shape
from sgl_frspec.explain.model_shape import preset_names

SWEEP = (8192, 16384, 32768, 65536, 131072, 262144)
MAPS = (8192, 32768)
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
    parser.add_argument("--no-eager", action="store_true", help="leave the eager loop out")
    parser.add_argument("--graphs", action="store_true", help="the eager loop as a CUDA graph too")
    parser.add_argument("--gpu", default="h200", help="whose reachable rates predictions take")
    servers = parser.add_argument_group("servers")
    servers.add_argument("--servers", action="store_true", help="start stock SGLang and FRSPEC")
    servers.add_argument("--map", type=int, nargs="+", default=MAPS, help="sizes of token maps")
    servers.add_argument("--attention-backend", default="triton")
    servers.add_argument("--model-folder", type=Path, default=Path(".cache/serving"))
    servers.add_argument("--start-seconds", type=float, default=240.0)
    servers.add_argument(
        "--trace",
        action="append",
        default=[],
        metavar="NAME:V=FILE",
        help="split a trace that a server wrote; its traced length stands for the cycle",
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
    if args.keep_traces and not args.out:
        raise ValueError("--keep-traces needs a folder: give --out")
    if args.cycles < 1:
        raise ValueError(f"--cycles is {args.cycles}; it must be at least 1")
    shape = read_model_shape(args.config)
    if args.layers:
        full = shape.full_layers * args.layers // shape.layers
        shape = dataclasses.replace(shape, layers=args.layers, full_layers=max(1, full))
    spec = Speculation(shape.vocab, args.steps, args.top_k, args.nodes, args.batch, args.context)
    device = find_device(args.gpu)
    on_gpu = torch.cuda.is_available()
    machine = describe(torch.device("cuda" if on_gpu else "cpu"))
    splits, failures = list[Split](), dict[str, str]()
    if args.merge:
        earlier = [_earlier(folder) for folder in args.merge]
        machine = earlier[-1]["machine"]
        splits = [from_json(row) for run in earlier for row in run["splits"]]
    else:
        if args.trace:
            machine["gpu"] = "the trace's GPU"
        splits += _from_traces(args, spec)
        if not args.no_eager and not args.trace:
            splits += _eager(args, shape, spec, on_gpu)
        if args.servers:
            if not on_gpu:
                raise ValueError("--servers needs a GPU")
            measured, failures = _servers(args, shape, spec)
            splits += measured
        if on_gpu or args.trace:  # a CPU's times are not held to a GPU's rates
            splits = [with_prediction(found, shape, device, spec) for found in splits]
    return _report(args, splits, failures, machine, shape, spec, device)


def _earlier(folder: Path) -> dict[str, Any]:
    path = folder / "breakdown.json"
    try:
        return json.loads(path.read_text())
    except (OSError, json.JSONDecodeError) as error:
        raise ValueError(f"--merge {folder}: {path} cannot be read: {error}") from None


def _eager(
    args: argparse.Namespace, shape: ModelShape, spec: Speculation, on_gpu: bool
) -> list[Split]:
    if args.graphs and not on_gpu:
        raise ValueError("--graphs needs a GPU")
    if not on_gpu:
        print(CPU_NOTE)
    device = torch.device("cuda" if on_gpu else "cpu")
    dtype = torch.bfloat16 if on_gpu else torch.float32
    began = time.monotonic()
    loop = EagerLoop(shape, family_of(args.config), spec, device, dtype)
    print(f"eager model ready after {time.monotonic() - began:.1f} s", flush=True)
    splits = []
    traces = args.out / "traces" if args.keep_traces else None
    for vocab in args.vocab:
        if vocab < spec.top_k:
            raise ValueError(f"--vocab {vocab} is smaller than --top-k {spec.top_k}")
        loop.set_draft_vocab(vocab)
        for found in eager_run.measure(loop, args.cycles, args.graphs, traces):
            splits.append(found)
            print(f"{found.implementation}, V {vocab:,}: {found.cycle_us:.0f} us", flush=True)
    return splits


def _servers(
    args: argparse.Namespace, shape: ModelShape, spec: Speculation
) -> tuple[list[Split], dict[str, str]]:
    from bench.breakdown import server_run

    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    name = args.config if args.config in preset_names() else Path(args.config).stem
    began = time.monotonic()
    return server_run.measure(
        f"{name}-{shape.layers}",
        shape,
        spec,
        args.map,
        backend=args.attention_backend,
        model_folder=args.model_folder,
        out=args.out or args.model_folder,
        start_seconds=args.start_seconds,
        keep_traces=args.keep_traces,
        say=lambda line: print(f"[{time.monotonic() - began:6.1f}] {line}", flush=True),
    )


def _from_traces(args: argparse.Namespace, spec: Speculation) -> list[Split]:
    splits = []
    for given in args.trace:
        label, equals, path = given.partition("=")
        name, colon, vocab = label.rpartition(":")
        if not (equals and colon and name and vocab.isdigit()):
            raise ValueError(f"--trace {given!r}: write NAME:V=FILE, as frspec:32768=t.json.gz")
        if not Path(path).is_file():
            raise ValueError(f"--trace {given!r}: there is no file {path}")
        events = read_events(Path(path))
        splits.append(split(events, implementation=name, vocab=int(vocab), steps=spec.steps))
    return splits


def _report(
    args: argparse.Namespace,
    splits: Sequence[Split],
    failures: dict[str, str],
    machine: dict[str, str],
    shape: ModelShape,
    spec: Speculation,
    device: Device,
) -> int:
    if not splits:
        raise ValueError("nothing was measured")
    settings = (
        f"{spec.steps} steps, top-k {spec.top_k}, {spec.nodes} nodes, batch {spec.batch}, context "
        f"{spec.context}; {shape.layers} layers, {shape.vocab:,} tokens; {machine['gpu']}"
    )
    print(settings, end="\n\n")
    for found in splits:
        print(text.table(found), end="\n\n")
    print(text.summary(splits, shape.vocab))
    if args.out:
        note = "" if torch.cuda.is_available() or args.trace or args.merge else CPU_NOTE
        rows = [found.as_json() for found in splits]
        fits = {
            name: line.as_json(shape.vocab) for name, (_, _, line) in text.sweeps(splits).items()
        }
        document = {"machine": machine, "settings": settings, "splits": rows, "fits": fits}
        html = page.render(splits, machine, args.config, settings, device, shape.vocab, note)
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "breakdown.json").write_text(json.dumps(document, indent=1))
        (args.out / "breakdown.html").write_text(html, encoding="utf-8")
        print(f"written to {args.out}")
    for name, why in failures.items():
        print(f"FAILED {name}: {why}", file=sys.stderr)
    wrong = [found for found in splits if not found.adds_up]
    for found in wrong:
        name = f"{found.implementation}, V {found.vocab:,}"
        print(f"WRONG {name}: {text.sums(found)}", file=sys.stderr)
    return 1 if failures or wrong else 0
