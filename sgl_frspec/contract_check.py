"""Compare the table of :mod:`sgl_frspec.contract` with a copy of SGLang's source."""

import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from sgl_frspec.contract import FIELD_HOLDERS, NEEDS, Need
from sgl_frspec.source_tree import Definition, SourceTree


@dataclass(frozen=True)
class Drift:
    """A need that an SGLang does not meet."""

    need: Need
    problem: str

    def __str__(self) -> str:
        return f"{self.need} {self.problem}"


def check_contract(tree: SourceTree, *, cpu_engine: bool) -> list[Drift]:
    """What in ``tree`` differs from the table; empty when all is as expected.

    Args:
        tree: the folder that holds the package ``sglang``.
        cpu_engine: check also what only the CPU engine needs.
    """
    wanted = (need for need in NEEDS if cpu_engine or not need.cpu_only)
    return [Drift(need, found) for need in wanted if (found := problem(tree, need))]


def installed_tree() -> SourceTree | None:
    """The source of the SGLang that this Python would import, or None without one."""
    spec = importlib.util.find_spec("sglang")
    if spec is None or not spec.submodule_search_locations:
        return None
    return SourceTree(Path(spec.submodule_search_locations[0]).parent)


def problem(tree: SourceTree, need: Need) -> str | None:
    """How ``tree`` fails to meet ``need``, in words that follow the attribute's name; or None."""
    if need.kind == "field":
        found = any(tree.find(m, f"{holder}.{need.name}") for m, holder in FIELD_HOLDERS)
        return None if found or need.optional else "is no server argument"
    definition = tree.find(need.module, need.name)
    if definition is None:
        return None if need.optional else "is missing"
    if definition.kind != need.kind:
        return f"is a {definition.kind}, not a {need.kind}"
    return next(_differences(definition, need), None)


def _differences(definition: Definition, need: Need) -> Iterator[str]:
    names = {parameter.name for parameter in definition.parameters}
    takes_any = any(parameter.kind == "**" for parameter in definition.parameters)
    required = tuple(p.name for p in definition.parameters if p.required)
    if need.required is not None and required != need.required:
        yield f"takes {definition.signature}, not ({', '.join(need.required)})"
    missing = [] if takes_any else [name for name in need.keywords if name not in names]
    if missing:
        yield f"takes {definition.signature}, without {', '.join(missing)}"
    silent = [name for name in need.mentions if name not in definition.mentions]
    if silent:
        yield f"no longer uses {', '.join(silent)}"
