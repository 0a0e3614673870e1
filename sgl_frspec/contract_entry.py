"""An entry of the contract table, and how the table's files write one."""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

Kind = Literal["class", "function", "value", "field"]


@dataclass(frozen=True)
class Need:
    """One attribute.

    Attributes:
        name: dotted, within ``module``.
        kind: what it must be. A ``field`` is one of SGLang's server arguments.
        use: what this package does with it.
        required: a function's parameters without a default, in order; None to leave them open.
        keywords: parameters that are passed by name.
        mentions: names that the function's body must still refer to.
        optional: this package does without it where it is missing (older releases).
        cpu_only: needed by the CPU engine alone, which supports the newest release only.
    """

    name: str
    kind: Kind
    use: str
    required: tuple[str, ...] | None = None
    keywords: tuple[str, ...] = ()
    mentions: tuple[str, ...] = ()
    module: str = ""
    optional: bool = False
    cpu_only: bool = False

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


def in_module(
    module: str, *needs: Need, cpu_only: bool = False, optional: bool = False
) -> Iterator[Need]:
    """The needs, all in ``module``."""
    for need in needs:
        yield dataclasses.replace(need, module=module, cpu_only=cpu_only, optional=optional)


def cls(name: str, use: str) -> Need:
    """A class."""
    return Need(name, "class", use)


def fn(
    name: str,
    use: str,
    required: tuple[str, ...] | None = None,
    keywords: tuple[str, ...] = (),
    mentions: tuple[str, ...] = (),
) -> Need:
    """A function or method."""
    return Need(name, "function", use, required, keywords, mentions)


def values(owner: str, use: str, *names: str) -> Iterator[Need]:
    """Attributes of ``owner`` that are read or set."""
    for name in names:
        yield Need(f"{owner}.{name}", "value", use)


def fields(use: str, *names: str) -> Iterator[Need]:
    """Server arguments."""
    for name in names:
        yield Need(name, "field", use)


SELF = ("self",)
