"""``frspec diff``: two maps beside each other."""

import argparse
import sys
from pathlib import Path

from sgl_frspec.maps.commands.arguments import check_tokenizer, parse_sizes
from sgl_frspec.maps.comparison import compare
from sgl_frspec.maps.coverage import SIZES
from sgl_frspec.maps.files import load_token_map
from sgl_frspec.maps.report import as_text
from sgl_frspec.maps.vocabulary import read_vocabulary


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Declare the subcommand's arguments."""
    parser = subparsers.add_parser("diff", help="compare two maps")
    parser.add_argument("a", type=Path, metavar="A")
    parser.add_argument("b", type=Path, metavar="B")
    parser.add_argument("--sizes", help="such as 4k,8k,32768 (default: 4k to 64k)")
    parser.add_argument("--limit", type=int, default=10, help="ids to list of each (%(default)s)")
    parser.add_argument("--tokenizer", type=Path, help="to name the tokens")


def run(args: argparse.Namespace) -> int:
    """Print the comparison."""
    one, other = load_token_map(args.a), load_token_map(args.b)
    vocabulary = read_vocabulary(args.tokenizer) if args.tokenizer else None
    if vocabulary is not None:
        check_tokenizer(one, vocabulary, str(args.a))
        check_tokenizer(other, vocabulary, str(args.b))
    if args.sizes:
        sizes = parse_sizes(args.sizes)
    else:
        smaller = min(len(one), len(other))
        sizes = [size for size in SIZES if size < smaller] or [smaller]
    sections = compare(one, other, sizes=sizes, limit=args.limit, vocabulary=vocabulary)
    sys.stdout.write(as_text(sections))
    return 0
