"""The operations' entries: each module here has ``OPS``, a tuple of :class:`bench.op.OpSpec`.

A file put here is found; there is no list to edit. Modules whose name starts with an underscore
hold what entries share.
"""

import importlib
import pkgutil
import sys
from collections.abc import Collection
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


def load(wanted: Collection[str] = ()) -> tuple[list[OpSpec], list[BrokenEntry]]:
    """Every operation, or those of the modules and the operations named in ``wanted``.

    A module that raises on import does not stop the others: it is returned as broken, unless all
    that is wanted is in the others.

    Raises:
        ValueError: nothing has one of the names.
    """
    known = stems()
    modules = [stem for stem in known if stem in wanted]
    found, broken = _import(modules if wanted and set(wanted) <= set(known) else known)
    if not wanted:
        return [op for entry in found.values() for op in entry], broken
    names = {op.name for entry in found.values() for op in entry}
    if unknown := sorted(set(wanted) - set(known) - names):
        there = ", ".join((*known, *sorted(names - set(known))))
        raise ValueError(f"no operation is named {', '.join(unknown)}; there are: {there}")
    chosen = [op for stem in found for op in found[stem] if stem in wanted or op.name in wanted]
    return chosen, [entry for entry in broken if entry.stem in wanted]


def load_or_complain(
    wanted: Collection[str],
) -> tuple[list[OpSpec], list[BrokenEntry]] | None:
    """:func:`load` for a command: complaints go to standard error, None for an unknown name."""
    try:
        selected, broken = load(wanted)
    except ValueError as error:
        print(error, file=sys.stderr)
        return None
    for entry in broken:
        print(f"ERROR bench/ops/{entry.stem}.py: {entry.why}", file=sys.stderr)
    return selected, broken


def _import(wanted: Collection[str]) -> tuple[dict[str, tuple[OpSpec, ...]], list[BrokenEntry]]:
    """The operations of each module, and the modules that cannot be imported."""
    found: dict[str, tuple[OpSpec, ...]] = {}
    broken: list[BrokenEntry] = []
    for stem in wanted:
        try:
            found[stem] = tuple(importlib.import_module(f"{__name__}.{stem}").OPS)
        except Exception as error:  # whatever the entry or a library it needs raises
            broken.append(BrokenEntry(stem, f"{type(error).__name__}: {error}"))
    return found, broken
