"""The plugin's own options, as flags of the SGLang server command.

SGLang's argument record cannot be extended, so a flag's value travels in one environment variable,
which the server's processes inherit. It can be set directly too, for ``sglang.Engine``:
``FRSPEC_CONFIG='{"map_size": 32768}'``.
"""

import argparse
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

ENVIRONMENT_VARIABLE = "FRSPEC_CONFIG"

# What of a round FRSPEC does itself, unless --frspec-stock leaves it to SGLang.
PIECES = {
    "head": "the draft's LM head, softmax, top-k and map in one kernel",
    "tree": "growth and layout of the token tree",
    "accept": "greedy acceptance",
    "norms": "the draft's RMSNorms",
    "round": "the whole greedy round as one CUDA graph",
}


class OptionError(ValueError):
    """Options of the server command that FRSPEC cannot work with; the message says which."""


@dataclass(frozen=True)
class Options:
    """What FRSPEC takes besides SGLang's own arguments.

    Attributes:
        map_size: how many ids of the ranked map to draft over; None for all of them.
        stock: the pieces of a round that SGLang's own code does; of ``PIECES``.
        target_norms: whether the target's RMSNorms run on our kernel too, which rounds otherwise.
        draws: whether drafted tokens are drawn; set from SGLang's own
            ``--speculative-use-rejection-sampling``.
    """

    map_size: int | None = None
    stock: tuple[str, ...] = ()
    target_norms: bool = False
    draws: bool = False

    def uses(self, piece: str) -> bool:
        """Whether FRSPEC does this piece itself."""
        if piece not in PIECES:
            raise KeyError(piece)
        return piece not in self.stock


def read_options() -> Options:
    """The options in the environment.

    Raises:
        OptionError: the variable holds something else than a JSON object of known options.
    """
    text = os.environ.get(ENVIRONMENT_VARIABLE, "{}")
    try:
        values = json.loads(text)
    except ValueError as error:
        raise OptionError(f"{ENVIRONMENT_VARIABLE} is not JSON ({error}): {text!r}") from None
    known = [field.name for field in fields(Options)]
    if not isinstance(values, dict) or not set(values) <= set(known):
        raise OptionError(
            f"{ENVIRONMENT_VARIABLE} must be a JSON object with the keys {', '.join(known)}: {text}"
        )
    size = values.get("map_size")
    if size is not None and (type(size) is not int or size < 1):
        raise OptionError(
            f"{ENVIRONMENT_VARIABLE}: map_size is {size!r}; it must be an integer > 0"
        )
    stock = values.get("stock", [])
    if not isinstance(stock, list | tuple) or not all(piece in PIECES for piece in stock):
        raise OptionError(
            f"{ENVIRONMENT_VARIABLE}: stock is {stock!r}; it must be a list of {', '.join(PIECES)}"
        )
    for name in ("target_norms", "draws"):
        if type(values.get(name, False)) is not bool:
            raise OptionError(
                f"{ENVIRONMENT_VARIABLE}: {name} is {values[name]!r}; it must be true or false"
            )
    return Options(
        size, tuple(stock), values.get("target_norms", False), values.get("draws", False)
    )


def set_option(name: str, value: Any) -> None:
    """Keep an option's value where the server's other processes find it."""
    os.environ[ENVIRONMENT_VARIABLE] = json.dumps(asdict(read_options()) | {name: value})


class _StoreInEnvironment(argparse.Action):
    """Keep an option's value where the server's other processes find it."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        set_option(self.dest.removeprefix("frspec_"), values)
        setattr(namespace, self.dest, values)


class _SetInEnvironment(argparse._StoreTrueAction):  # pyright: ignore[reportPrivateUsage]
    """The same for an option without a value; SGLang's ``--config`` knows it by its base class."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        set_option(self.dest.removeprefix("frspec_"), True)
        super().__call__(parser, namespace, values, option_string)


def add_server_flags(parser: argparse.ArgumentParser) -> None:
    """Add the options to the parser of the server command."""
    group = parser.add_argument_group("FRSPEC", "frequency-ranked speculative decoding")
    group.add_argument(
        "--frspec-map-size",
        type=_positive,
        metavar="N",
        action=_StoreInEnvironment,
        help="draft over the N best ranked ids of --speculative-token-map (default: all of them)",
    )
    group.add_argument(
        "--frspec-stock",
        type=_pieces,
        metavar="PIECE,…",
        action=_StoreInEnvironment,
        help="leave these pieces of a round to SGLang's own code: "
        + "; ".join(f"{name} ({what})" for name, what in PIECES.items()),
    )
    group.add_argument(
        "--frspec-target-norms",
        action=_SetInEnvironment,
        help="run the target's RMSNorms on FRSPEC's kernel too; its rounding differs from SGLang's",
    )


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not a positive number of ids")
    return value


def _pieces(text: str) -> list[str]:
    names = [name for name in text.split(",") if name]
    for name in names:
        if name not in PIECES:
            raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(PIECES)}")
    return names
