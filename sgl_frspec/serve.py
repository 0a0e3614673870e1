"""``frspec serve``: SGLang's own server, on the GPU or, where there is none, on the CPU engine.

Every flag but ``--help`` goes to ``python -m sglang.launch_server`` as it is.
"""

import argparse
import importlib.util
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sgl_frspec.cpu_engine import ATTENTION_BACKEND
from sgl_frspec.cpu_engine.environment import cpu_environment

# What the CPU engine needs or what its users expect, unless the caller says otherwise. SGLang
# would size the KV pool by a share of the machine's whole memory, and load bf16, which CPUs
# without matrix instructions for it compute slowly and which rounds.
CPU_DEFAULTS: dict[str, str | None] = {
    "--device": "cpu",
    "--attention-backend": ATTENTION_BACKEND,
    "--sampling-backend": "pytorch",
    "--disable-overlap-schedule": None,
    "--dtype": "float32",
    "--max-total-tokens": "16384",
}


@dataclass(frozen=True)
class ServerCommand:
    """What to execute: ``argv`` and the complete environment; ``device`` is ``cpu`` or ``gpu``."""

    argv: list[str]
    environment: dict[str, str]
    device: str


def server_command(
    flags: Sequence[str], environment: Mapping[str, str] | None = None, *, gpu: bool | None = None
) -> ServerCommand:
    """The command that serves with SGLang's ``flags``.

    Args:
        flags: flags of ``sglang.launch_server``.
        environment: to start from; the process's own by default.
        gpu: whether to use a GPU; by default what ``--device`` says, else whether there is one.

    Raises:
        ValueError: SGLang is not installed, or the CPU engine is asked for in a GPU installation.
    """
    if importlib.util.find_spec("sglang") is None:
        raise ValueError(
            "SGLang is not installed: on a GPU machine run `pip install 'sgl-frspec[gpu]'`; "
            "docs/cpu-engine.md says how without a GPU"
        )
    base = dict(os.environ if environment is None else environment)
    if gpu is None:
        gpu = _wants_gpu(flags)
    argv = [sys.executable, "-m", "sglang.launch_server", *flags]
    if gpu:
        return ServerCommand(argv, base, "gpu")
    return ServerCommand(argv + _missing_defaults(flags), cpu_environment(base), "cpu")


def add_parser(subparsers: Any) -> None:
    """Add ``serve``; ``--help`` is SGLang's, with the plugin's flags in it."""
    parser = subparsers.add_parser(
        "serve",
        help="start an SGLang server that drafts with a token map",
        add_help=False,
        # Nothing looks like an option to this parser: all words belong to SGLang's.
        prefix_chars="\0",
    )
    parser.add_argument("flags", nargs=argparse.REMAINDER)


def run(args: argparse.Namespace) -> int:
    """Become the server: signals and the exit status are SGLang's own."""
    command = server_command(args.flags)
    if command.device == "cpu":
        sys.stderr.write("frspec serve: no GPU is used; starting the CPU engine\n")
    sys.stderr.flush()
    os.execve(command.argv[0], command.argv, command.environment)


def _wants_gpu(flags: Sequence[str]) -> bool:
    device = _value(flags, "--device")
    if device is not None:
        return device != "cpu"
    import torch

    return torch.accelerator.is_available()


def _missing_defaults(flags: Sequence[str]) -> list[str]:
    given = {flag.partition("=")[0] for flag in flags}
    missing = []
    for flag, value in CPU_DEFAULTS.items():
        if flag not in given:
            missing += [flag] if value is None else [flag, value]
    return missing


def _value(flags: Sequence[str], name: str) -> str | None:
    for i, flag in enumerate(flags):
        if flag == name:
            return flags[i + 1] if i + 1 < len(flags) else None
        if flag.startswith(f"{name}="):
            return flag.removeprefix(f"{name}=")
    return None
