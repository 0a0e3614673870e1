"""``frspec merge``: blend several maps into one."""

import argparse
import sys
from pathlib import Path

from sgl_frspec.maps.commands.arguments import check_output
from sgl_frspec.maps.commands.rank import summary
from sgl_frspec.maps.corpus.sources import parse_source
from sgl_frspec.maps.files import load_token_map, save_token_map
from sgl_frspec.maps.merging import merge_maps

EPILOG = """\
  frspec merge traffic.safetensors,weight=70 chinese.safetensors,weight=30 -o both.safetensors

Merge whole rankings and cut the result: an id that a cut removed counts as never seen.
"""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Declare the subcommand's arguments."""
    parser = subparsers.add_parser(
        "merge",
        help="blend several maps into one",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("maps", nargs="+", metavar="MAP[,weight=W]")
    parser.add_argument("-o", "--output", required=True, type=Path)


def run(args: argparse.Namespace) -> int:
    """Merge, write, and say what came out."""
    check_output(args.output, ".safetensors")
    named = [parse_source(text) for text in args.maps]
    maps = [load_token_map(source.location) for source in named]
    merged = merge_maps(maps, [source.weight for source in named])
    save_token_map(merged, args.output)
    for source, token_map in zip(named, maps, strict=True):
        total = token_map.metadata.total_count
        if token_map.counts is not None and total and int(token_map.counts.sum()) < total:
            sys.stdout.write(
                f"note: {source.name} was cut; what it no longer holds counts as never seen\n"
            )
    sys.stdout.write(f"{args.output}: {summary(merged)}\n")
    return 0
