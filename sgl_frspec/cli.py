"""The ``frspec`` command. Each subcommand's module is imported only when it is called."""

import argparse
import importlib
import sys
from collections.abc import Sequence
from types import ModuleType

from sgl_frspec import __version__

# Each module exposes add_parser(subparsers) and run(args) -> exit status.
COMMANDS: dict[str, tuple[str, str]] = {
    "check": ("sgl_frspec.check", "versions, GPU, kernels, and the SGLang attributes relied on"),
    "serve": ("sgl_frspec.serve", "start an SGLang server that drafts with a token map"),
    "rank": ("sgl_frspec.maps.commands.rank", "text -> ranked token map"),
    "inspect": (
        "sgl_frspec.maps.commands.inspect",
        "what a map holds, and how much it covers",
    ),
    "diff": ("sgl_frspec.maps.commands.diff", "compare two maps"),
    "merge": ("sgl_frspec.maps.commands.merge", "blend several maps into one"),
    "cut": ("sgl_frspec.maps.commands.cut", "the best ranked part of a map"),
    "convert": ("sgl_frspec.maps.commands.convert", "to and from the .pt lists of other engines"),
    "choose": ("sgl_frspec.maps.commands.choose", "the best map size for a model, GPU and traffic"),
    "explain": ("sgl_frspec.explain.command", "where the time of a cycle must go"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand and return its exit status."""
    argv = list(sys.argv[1:] if argv is None else argv)
    name = next((word for word in argv if not word.startswith("-")), None)
    try:
        command = _import_command(name) if name in COMMANDS else None
    except ImportError as error:
        print(f"frspec {name} is not available: {error}", file=sys.stderr)
        return 1
    args = _parser(name, command).parse_args(argv)
    try:
        return command.run(args) if command else 2
    except ValueError as error:
        print(f"frspec {name}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _import_command(name: str) -> ModuleType:
    return importlib.import_module(COMMANDS[name][0])


def _parser(name: str | None, command: ModuleType | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="frspec", description="Frequency-ranked speculative decoding for SGLang."
    )
    parser.add_argument("--version", action="version", version=f"frspec {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for other, (_, summary) in COMMANDS.items():
        if other == name and command is not None:
            command.add_parser(subparsers)
        else:
            subparsers.add_parser(other, help=summary, add_help=False)
    return parser


if __name__ == "__main__":
    sys.exit(main())
