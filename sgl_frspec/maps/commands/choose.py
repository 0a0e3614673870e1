"""``frspec choose``: the best map size for a model, a GPU and its traffic."""

import argparse
import sys
from pathlib import Path

import numpy as np

from sgl_frspec.maps.bench_results import head_times_ms
from sgl_frspec.maps.choice_report import (
    as_json,
    picture_bytes,
    table,
    time_note,
    verdict_lines,
)
from sgl_frspec.maps.choosing import (
    AcceptModel,
    Coverage,
    cycle_time,
    predict,
    size_grid,
)
from sgl_frspec.maps.commands.arguments import (
    add_text_arguments,
    check_output,
    check_tokenizer,
    count_domains,
    parse_size,
    parse_sizes,
)
from sgl_frspec.maps.coverage import coverage_curve
from sgl_frspec.maps.files import atomic_file, load_token_map
from sgl_frspec.maps.report import as_text
from sgl_frspec.maps.token_map import TokenMap, TokenMapError
from sgl_frspec.maps.vocabulary import read_vocabulary

FULL = "full"
EPILOG = """\
  frspec choose map.safetensors --steps 6 \\
      --cycle-ms 8k=17.04 --cycle-ms full=21.63 \\
      --accept 8k=3.13 --accept 32k=3.63 --accept full=3.89

Times and accept lengths come from runs of the server at a few sizes, with the traffic that matters.
Instead of a second cycle time, times of the draft step (--step-ms) or of its head (--bench) may
give the slope. With --text and --tokenizer, coverage of held-out text carries the accept length
from the sizes that were measured to the others; one is enough then.
"""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Declare the subcommand's arguments."""
    parser = subparsers.add_parser(
        "choose",
        help="the best map size for a model, GPU and traffic",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("map", type=Path, metavar="MAP")
    add("--steps", type=int, required=True, help="draft steps a cycle")
    for flag, what in (
        ("--cycle-ms", "measured time of a draft and verify cycle"),
        ("--accept", "measured mean accept length (bonus token included)"),
    ):
        add(flag, action="append", required=True, metavar="SIZE=X", help=f"{what}; repeatable")
    add("--step-ms", action="append", default=[], metavar="SIZE=X", help="time of a draft step")
    add("--bench", type=Path, help="kernels.json of `python -m bench kernels --out DIR`")
    add("--bench-case", default="", help="words of its cases, such as rows4,bf16,contiguous")
    add("--bench-provider", default="ours", help="whose times (%(default)s)")
    add("--token-ms", type=float, help="time of a token without speculation, to compare with")
    add("--vocab-size", type=int, help="of the model, if the map does not say it")
    add("--tokenizer", type=Path, help="model folder or tokenizer file; needed with --text")
    add_text_arguments(parser)
    add("--sizes", help="sizes to consider (default: 2k, 3k, 4k, 6k, … up to the map's)")
    add("--picture", type=Path, help="tokens per second by size, .html, .svg or .png")
    add("--json", action="store_true", help="print JSON instead of a table")


def run(args: argparse.Namespace) -> int:
    """Predict every size, and say which is best and whether it pays."""
    if args.picture is not None:
        check_output(args.picture, ".html", ".svg", ".png")
    if args.steps < 1:
        raise TokenMapError(f"--steps {args.steps}: a cycle has one draft step at least")
    token_map = load_token_map(args.map)
    vocab_size = args.vocab_size or token_map.metadata.vocab_size
    if vocab_size is None:
        raise TokenMapError(f"{args.map}: does not say its vocabulary's size; pass --vocab-size")
    coverage = _coverage(args, token_map, vocab_size)
    measured = _measured(args.accept, vocab_size, "--accept")
    if coverage is None and vocab_size not in measured:
        raise TokenMapError("without --text, give the full vocabulary's accept length: full=X")
    accept = AcceptModel(measured, args.steps, coverage)
    cycle_ms = _measured(args.cycle_ms, vocab_size, "--cycle-ms")
    step_ms = _step_times(args, vocab_size)
    time = cycle_time(cycle_ms, step_ms, args.steps)
    sizes = _sizes(args.sizes, len(token_map), vocab_size, accept, coverage)
    *maps, full = predict([*sizes, vocab_size], time, accept, coverage)
    verdict = verdict_lines(maps, full, args.token_ms, accept)
    if args.json:
        sys.stdout.write(as_json(maps, full, time, verdict))
    else:
        note = time_note(time, len(step_ms or cycle_ms))
        sections = [table(maps, full, args.token_ms)]
        sys.stdout.write(as_text(sections) + "\n" + "\n".join([note, *verdict]) + "\n")
    if args.picture is not None:
        image = picture_bytes(args.picture.suffix, maps, full, args.token_ms, verdict)
        with atomic_file(args.picture) as file:
            file.write(image)
    return 0


def _sizes(
    text: str | None,
    largest: int,
    vocab_size: int,
    accept: AcceptModel,
    coverage: Coverage | None,
) -> list[int]:
    """Sizes to predict; without coverage, nothing is known of those outside the measured ones."""
    sizes = parse_sizes(text) if text else size_grid(largest)
    sizes = [size for size in sizes if size <= largest and size < vocab_size]
    known = [size for size in sizes if coverage is not None or accept.within(size)]
    if not known:
        raise TokenMapError(
            f"no size to predict: the map has {largest} ids, and without --text only sizes between"
            " measured accept lengths can be"
        )
    return known


def _measured(pairs: list[str], vocab_size: int, flag: str) -> dict[int, float]:
    values: dict[int, float] = {}
    for pair in pairs:
        name, _, text = pair.partition("=")
        try:
            value = float(text)
        except ValueError:
            raise TokenMapError(f"{flag} {pair}: write SIZE=X, such as 32k=3.63") from None
        size = vocab_size if name == FULL else parse_size(name)
        if size > vocab_size or size in values:
            reason = "is given twice" if size in values else f"is beyond {vocab_size} ids"
            raise TokenMapError(f"{flag} {pair}: size {size} {reason}")
        values[size] = value
    return values


def _step_times(args: argparse.Namespace, vocab_size: int) -> dict[int, float] | None:
    if args.bench is None:
        return _measured(args.step_ms, vocab_size, "--step-ms") or None
    if args.step_ms:
        raise TokenMapError("give --step-ms or --bench, not both")
    words = [word for word in args.bench_case.split(",") if word]
    return head_times_ms(args.bench, provider=args.bench_provider, words=words)


def _coverage(args: argparse.Namespace, token_map: TokenMap, vocab_size: int) -> Coverage | None:
    if not args.text:
        return None
    if args.tokenizer is None:
        raise TokenMapError("--text needs --tokenizer, the folder or file of the map's tokenizer")
    vocabulary = read_vocabulary(args.tokenizer)
    check_tokenizer(token_map, vocabulary, str(args.map))
    counts = np.stack(list(count_domains(args, vocabulary).values())).sum(axis=0)
    curve = coverage_curve(token_map, counts)

    def covered(size: int) -> float:
        return 1.0 if size >= vocab_size else float(curve[min(size, len(curve)) - 1])

    return covered
