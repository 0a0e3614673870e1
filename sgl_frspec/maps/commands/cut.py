"""``frspec cut``: the best ranked part of a map."""

import argparse
import sys
from pathlib import Path

from sgl_frspec.maps.commands.arguments import check_output, parse_size
from sgl_frspec.maps.coverage import own_coverage
from sgl_frspec.maps.files import load_token_map, save_token_map
from sgl_frspec.maps.report import percent


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Declare the subcommand's arguments."""
    parser = subparsers.add_parser(
        "cut",
        help="the best ranked part of a map",
        description="A server cuts a map when it loads it; a smaller file is for passing on.",
    )
    parser.add_argument("map", type=Path, metavar="MAP")
    parser.add_argument("--size", required=True, help="ids to keep, such as 32768 or 32k")
    parser.add_argument("-o", "--output", required=True, type=Path)


def run(args: argparse.Namespace) -> int:
    """Cut, write, and say what is left of the ranking's corpus."""
    check_output(args.output, ".safetensors")
    size = parse_size(args.size)
    token_map = load_token_map(args.map)
    save_token_map(token_map.first(size), args.output)
    covered = own_coverage(token_map, [size])
    note = f", {percent(covered[0])} of the ranking's corpus" if covered else ""
    sys.stdout.write(f"{args.output}: {size:,} of {len(token_map):,} ids{note}\n")
    return 0
