"""From the command's arguments to the comparisons: models made, memory shared out."""

import argparse
import dataclasses
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from bench.serving import trace
from bench.serving.chain_model import make_chain_model
from bench.serving.comparison import PROFILED_ROUNDS, Plan
from bench.serving.measure import Lengths
from bench.serving.prompts import ChainPrompts, Prompts, RealPrompts, Workload
from bench.serving.servers import Say, Settings, kv_tokens_that_fit
from bench.serving.shapes import REAL_MODEL, SHAPES, Shape
from bench.serving.variants import BASES, Tree, flag_words, parse_variants
from examples.smollm2_135m.serving import DRAFT, MODEL, TOKEN_MAP

DEFAULT_TREE = "3x4x16"
# Dimensions of the embedded model; its weights are read, not made.
REAL_SHAPE = Shape("smollm2", "SmolLM2-135M", 49_152, 576, 1_536, 30, 9, 3, 64)


def make_plans(
    args: argparse.Namespace, run: str, gpu: bool, began: float, say: Say
) -> Iterator[Plan]:
    """A plan for each tree.

    Args:
        args: of the command.
        run: names the run.
        gpu: whether the servers use one.
        began: ``time.monotonic()`` that the time limit counts from.
        say: reports progress.

    Raises:
        ValueError: arguments that make no comparison.
    """
    variants = parse_variants(args.variant or list(BASES))
    workloads = _workloads(args)
    out = args.out or Path(tempfile.mkdtemp(prefix="bench-serve-"))
    shape, paths, prompts = _model(args, gpu, say)
    first = {"none": [], "first": workloads[:1], "all": workloads}[args.profile]
    for i, tree in enumerate(Tree.parse(text) for text in args.tree or [DEFAULT_TREE]):
        # Without speculation there is no tree: once is enough.
        chosen = [v for v in variants if i == 0 or v.speculates]
        settings = Settings(
            *paths,
            tree=tree,
            logs=out / "logs",
            gpu=gpu,
            backend=args.attention_backend if gpu else "frspec_cpu",
            batches=tuple(sorted({workload.batch for workload in workloads})),
            start_together=args.start == "together" and args.place == "side-by-side",
            kv_tokens=_kv_tokens(args, shape, workloads, tree, len(chosen), gpu),
            start_seconds=args.start_seconds,
            flags=_common_flags(args, workloads),
        )
        yield Plan(
            run=run,
            shape=_name(args),
            settings=settings,
            variants=chosen,
            workloads=workloads,
            prompts=prompts,
            lengths=Lengths(args.short_tokens, args.tokens, args.sample_seconds * 1e3),
            alternations=args.alternations,
            side_by_side=args.place == "side-by-side",
            profiled=first if gpu else [],
            deadline=began + args.time_limit if args.time_limit else float("inf"),
            traces=Path(tempfile.mkdtemp(prefix="bench-traces-")),
        )


def _workloads(args: argparse.Namespace) -> list[Workload]:
    """Those named, or batches in the order given and for each the contexts in the order given."""
    if args.workload and args.batch:
        raise ValueError("--workload names the batches itself: leave --batch and --context out")
    batches = args.batch or [1]
    if args.workload:
        chosen = [Workload.parse(text) for text in args.workload]
    else:
        chosen = [Workload(batch, context) for batch in batches for context in args.context]
    least = min(min(workload.batch, workload.context) for workload in chosen)
    if min(least, args.alternations, args.short_tokens) < 1:
        raise ValueError("batches, contexts, alternations and tokens must be at least 1")
    if args.tokens <= args.short_tokens:
        raise ValueError(f"--tokens {args.tokens} must exceed --short-tokens {args.short_tokens}")
    if not args.sample_seconds > 0:
        raise ValueError(f"--sample-seconds {args.sample_seconds} must be positive")
    return chosen


def _name(args: argparse.Namespace) -> str:
    return f"{args.shape}-{args.layers}-layers" if args.layers else args.shape


def _model(
    args: argparse.Namespace, gpu: bool, say: Say
) -> tuple[Shape, tuple[Path, Path, Path], Prompts]:
    if args.shape == REAL_MODEL:
        folder = args.model_folder if (args.model_folder / "config.json").exists() else MODEL
        if not (folder / "config.json").exists():
            raise ValueError(
                f"no converted model in {folder}: run `python -m examples.smollm2_135m.convert"
                f" --out {folder}`, or name its folder with --model-folder"
            )
        return REAL_SHAPE, (folder, DRAFT, TOKEN_MAP), RealPrompts()
    shape = SHAPES[args.shape]
    if args.layers:
        shape = dataclasses.replace(shape, layers=args.layers)
    if not gpu and shape.dtype != "float32":
        raise ValueError(f"shape {args.shape} needs a GPU; the CPU engine serves --shape tiny")
    began = time.monotonic()
    model = make_chain_model(args.model_folder / _name(args), shape)
    say(f"model {_name(args)} ready after {time.monotonic() - began:.1f} s")
    return shape, (model.target, model.draft, model.token_map), ChainPrompts(model.chain)


def _kv_tokens(
    args: argparse.Namespace,
    shape: Shape,
    workloads: Sequence[Workload],
    tree: Tree,
    servers: int,
    gpu: bool,
) -> int:
    longest = max(args.tokens, trace.answer_tokens(PROFILED_ROUNDS))
    needed = max(w.kv_tokens(longest, tree.nodes, tree.top_k, tree.steps) for w in workloads)
    # Earlier workloads' prompts stay in the prefix cache until they are evicted.
    wanted = needed + needed // 4 + 8192
    if not gpu or args.place == "in-turn":
        return wanted
    return kv_tokens_that_fit(servers, shape.weight_bytes, shape.kv_bytes_per_token, wanted)


def _common_flags(args: argparse.Namespace, workloads: Sequence[Workload]) -> tuple[str, ...]:
    flags = ["--max-running-requests", str(max(workload.batch for workload in workloads))]
    if args.shape != REAL_MODEL:
        flags.append("--skip-tokenizer-init")
    return (*flags, *flag_words(args.flags, "--flags"))
