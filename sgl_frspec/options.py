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


class OptionError(ValueError):
    """Options of the server command that FRSPEC cannot work with; the message says which."""


@dataclass(frozen=True)
class Options:
    """What FRSPEC takes besides SGLang's own arguments.

    Attributes:
        map_size: how many ids of the ranked map to draft over; None for all of them.
    """

    map_size: int | None = None


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
    return Options(**values)


class _StoreInEnvironment(argparse.Action):
    """Keep an option's value where the server's other processes find it."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        options = asdict(read_options()) | {self.dest.removeprefix("frspec_"): values}
        os.environ[ENVIRONMENT_VARIABLE] = json.dumps(options)
        setattr(namespace, self.dest, values)


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


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not a positive number of ids")
    return value
