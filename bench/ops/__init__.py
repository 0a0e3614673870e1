"""The operations' entries: each module here has ``OPS``, a tuple of :class:`bench.op.OpSpec`.

A file put here is found; there is no list to edit. Modules whose name starts with an underscore
hold what entries share.
"""

import importlib
import pkgutil
from typing import NamedTuple

from bench.op import OpSpec


class BrokenEntry(NamedTuple):
    """An entry module that cannot be imported, and why."""

    stem: str
    why: str


def stems() -> list[str]:
    """Names of the entry modules."""
    found = (module.name for module in pkgutil.iter_modules(__path__))
    return sorted(name for name in found if not name.startswith("_"))


def load(wanted: str | None = None) -> tuple[list[OpSpec], list[BrokenEntry]]:
    """Every operation, or those of the module or the operation named ``wanted``.

    A module that raises on import does not stop the others: it is returned as broken.

    Raises:
        ValueError: nothing has that name.
    """
    known = stems()
    ops, broken = _import(known if wanted not in known else [wanted])
    if wanted is None or wanted in known:
        return ops, broken
    named = [op for op in ops if op.name == wanted]
    if not named:
        names = ", ".join((*known, *(op.name for op in ops)))
        raise ValueError(f"no operation is named {wanted!r}; there are: {names}")
    return named, []


def _import(wanted: list[str]) -> tuple[list[OpSpec], list[BrokenEntry]]:
    ops: list[OpSpec] = []
    broken: list[BrokenEntry] = []
    for stem in wanted:
        try:
            ops += importlib.import_module(f"{__name__}.{stem}").OPS
        except Exception as error:  # whatever the entry or a library it needs raises
            broken.append(BrokenEntry(stem, f"{type(error).__name__}: {error}"))
    return ops, broken
