"""Mounts the subcommands: ``python -m bench COMMAND``. Each is a module of ``bench.commands``.

A command module has ``main(argv) -> exit status``. It is imported when it is asked for, so a
missing optional package stops one command, not all.
"""

import argparse
import importlib
import sys

COMMANDS = {
    "breakdown": "split a cycle of an eager loop and of servers into parts and GPU idle time",
    "cross-compile": "compile every shipped kernel for four GPUs, none needed; refuse spills",
    "serve": "start real servers without and with speculation, and compare their rounds",
    "map-sizes": "serve FRSPEC at several map sizes; is the best the one that choose names",
    "kernels": "check every operation against fp64, then time it beside its alternatives",
    "tree-launches": "count the kernels that a round's tree bookkeeping launches",
    "tune": "time the launch configurations of an operation, print rows for its table",
}


def main(argv: list[str]) -> int:
    """Run the subcommand that ``argv`` names and return its exit status."""
    parser = argparse.ArgumentParser(prog="python -m bench", description="Check, then time.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, summary in COMMANDS.items():
        commands.add_parser(name, help=summary, add_help=False)
    command = parser.parse_args(argv[:1]).command
    module = command.replace("-", "_")
    return importlib.import_module(f"bench.commands.{module}").main(argv[1:])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
