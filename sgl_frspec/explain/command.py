"""``frspec explain``: where a cycle's time must go, from a configuration alone."""

import argparse
import dataclasses
import json
from typing import Any

from sgl_frspec.explain.cycle import Head, Speculation, cycle_cost
from sgl_frspec.explain.device import Device, device_names, find_device
from sgl_frspec.explain.ledger import CycleCost
from sgl_frspec.explain.line import VocabularyLine, vocabulary_line
from sgl_frspec.explain.model_shape import ModelShape, preset_names, read_model_shape
from sgl_frspec.explain.report import render

SWEEP = (8192, 16384, 32768, 65536, 131072, 262144)


def add_parser(subparsers: Any) -> None:
    """Add ``explain`` to the command's parsers."""
    parser = subparsers.add_parser(
        "explain",
        help="where the time of a draft and verify cycle must go",
        description="Bytes, operations and least time of each part of a speculative cycle, for an "
        "EAGLE-2 draft of the given model: with the full vocabulary, with a map on the stock chain "
        "of kernels, and with a map and a fused draft head. Needs no GPU.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "config", help=f"config.json, model folder, or one of: {', '.join(preset_names())}"
    )
    parser.add_argument("--gpu", default="h200", help=f"one of: {', '.join(device_names())}")
    parser.add_argument("--bandwidth", type=float, help="reachable TB/s, instead of the GPU's")
    parser.add_argument("--flops", type=float, help="reachable bf16 PFLOP/s, likewise")
    parser.add_argument("--map-size", type=int, default=32768, help="ids that the draft proposes")
    parser.add_argument("--steps", type=int, default=6, help="draft steps a cycle")
    parser.add_argument("--top-k", type=int, default=10, help="branches a step")
    parser.add_argument("--nodes", type=int, default=60, help="tokens verified a cycle")
    parser.add_argument("--batch", type=int, default=1, help="requests")
    parser.add_argument("--context", type=int, default=300, help="tokens in the cache of each")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def run(args: argparse.Namespace) -> int:
    """Print the explanation."""
    shape = read_model_shape(args.config)
    device = _device(args)
    spec = Speculation(
        draft_vocab=min(args.map_size, shape.vocab),
        steps=args.steps,
        top_k=args.top_k,
        nodes=args.nodes,
        batch=args.batch,
        context=args.context,
    )
    full = dataclasses.replace(spec, draft_vocab=shape.vocab)
    columns = {
        "stock, full": cycle_cost(shape, device, full, head="chain"),
        "stock, map": cycle_cost(shape, device, spec, head="chain"),
        "fused, map": cycle_cost(shape, device, spec, head="fused"),
    }
    line = _line(shape, device, spec, "chain")
    if args.json:
        print(json.dumps(_as_json(shape, device, spec, columns, line), indent=2))
    else:
        print(render(shape, device, spec, columns, line))
    return 0


def _device(args: argparse.Namespace) -> Device:
    for flag in ("bandwidth", "flops"):
        value = getattr(args, flag)
        if value is not None and value <= 0:
            raise ValueError(f"--{flag} is {value}; it must be positive")
    if args.bandwidth and args.flops:
        return Device("given", args.bandwidth * 1e12, args.flops * 1e15)
    device = find_device(args.gpu)
    if args.bandwidth:
        device = dataclasses.replace(device, bytes_per_s=args.bandwidth * 1e12)
    if args.flops:
        device = dataclasses.replace(device, flops_per_s=args.flops * 1e15)
    return device


def _line(shape: ModelShape, device: Device, spec: Speculation, head: Head) -> VocabularyLine:
    """The line over the sweep, continued past the model's own vocabulary by wider heads."""
    widest = dataclasses.replace(shape, vocab=max(*SWEEP, shape.vocab))
    base = cycle_cost(shape, device, spec, head=head).expected_s("verify")
    seconds = [
        base
        + cycle_cost(
            widest, device, dataclasses.replace(spec, draft_vocab=vocab), head=head
        ).expected_s("draft")
        for vocab in SWEEP
    ]
    return vocabulary_line(SWEEP, seconds)


def _as_json(
    shape: ModelShape,
    device: Device,
    spec: Speculation,
    columns: dict[str, CycleCost],
    line: VocabularyLine,
) -> dict[str, Any]:
    return {
        "model": dataclasses.asdict(shape),
        "device": dataclasses.asdict(device),
        "speculation": dataclasses.asdict(spec),
        "cycles": {
            name: [dataclasses.asdict(part) for part in cost.parts]
            for name, cost in columns.items()
        },
        "line": dataclasses.asdict(line) | {"ceiling": line.ceiling(shape.vocab)},
    }
