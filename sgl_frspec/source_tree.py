"""Find a module's classes, functions and attributes in a source tree, without importing it.

Reading the text costs milliseconds, needs none of the package's dependencies, and works on any
version that lies in a folder. Imports inside the tree are followed, and so are base classes.
"""

import ast
import dataclasses
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

Kind = Literal["module", "class", "function", "value"]

_MAX_REDIRECTIONS = 8


@dataclasses.dataclass(frozen=True)
class Parameter:
    """One parameter of a function; ``kind`` is ``*`` or ``**`` for the variadic ones."""

    name: str
    required: bool = True
    kind: Literal["", "*", "**"] = ""

    def __str__(self) -> str:
        return self.kind + self.name + ("" if self.required or self.kind else "=")


@dataclasses.dataclass(frozen=True)
class Definition:
    """What a dotted name stands for.

    ``parameters`` is empty unless ``kind`` is ``function``; properties are values, as they are to
    those who read them. ``mentions`` are the plain names in a function's body.
    """

    kind: Kind
    module: str
    name: str
    parameters: tuple[Parameter, ...] = ()
    mentions: frozenset[str] = frozenset()

    @property
    def signature(self) -> str:
        """The parameters as ``(self, batch, steps=, **kwargs)``."""
        return f"({', '.join(map(str, self.parameters))})"


class SourceTree:
    """The ``*.py`` files under one folder that is on (or could be on) ``sys.path``."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._module = functools.cache(self._parse)

    def find(self, module: str, name: str = "") -> Definition | None:
        """The definition of ``name`` (dotted, such as ``Class.method``) in ``module``, or None."""
        return self._find(module, name, _MAX_REDIRECTIONS)

    def _find(self, module: str, name: str, redirections: int) -> Definition | None:
        tree = self._module(module)
        if tree is None or redirections == 0:
            return None
        if not name:
            return Definition("module", module, "")
        first, _, rest = name.partition(".")
        node = _lookup(tree.body, first)
        if isinstance(node, ast.ImportFrom):
            origin = self._origin(node, module)
            original = next(a.name for a in node.names if (a.asname or a.name) == first)
            submodule = f"{origin}.{original}"
            if self._module(submodule) is not None:
                return self._find(submodule, rest, redirections - 1)
            return self._find(origin, f"{original}.{rest}" if rest else original, redirections - 1)
        if isinstance(node, ast.ClassDef) and rest:
            return self._member(node, module, rest, redirections)
        return None if node is None or rest else _define(node, module, name)

    def _member(
        self, cls: ast.ClassDef, module: str, name: str, redirections: int
    ) -> Definition | None:
        node = _lookup(cls.body, name) or _instance_attribute(cls, name)
        if node is not None:
            return _define(node, module, f"{cls.name}.{name}")
        for base in cls.bases:
            if found := self._find(module, f"{ast.unparse(base)}.{name}", redirections - 1):
                return found
        return None

    def _origin(self, node: ast.ImportFrom, module: str) -> str:
        if not node.level:
            return node.module or ""
        is_package = (self.root.joinpath(*module.split(".")) / "__init__.py").exists()
        package = module.split(".")[: None if is_package else -1]
        package = package[: len(package) - node.level + 1]
        return ".".join([*package, *([node.module] if node.module else [])])

    def _parse(self, module: str) -> ast.Module | None:
        path = self.root.joinpath(*module.split("."))
        for file in (path.with_suffix(".py"), path / "__init__.py"):
            if file.is_file():
                return ast.parse(file.read_bytes(), filename=str(file))
        return None


def _lookup(body: list[ast.stmt], name: str) -> ast.stmt | None:
    """The last statement that binds ``name`` in ``body``, as Python would have it.

    A class that is rebuilt under its own name (``C = rebuild(C)``) is still the class.
    """
    found = None
    for statement in _statements(body):
        rebuilt = isinstance(found, ast.ClassDef) and isinstance(statement, ast.Assign)
        if name in _bound_names(statement) and not rebuilt:
            found = statement
    return found


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements of one scope: also inside ``if``, ``try`` and ``with``, not inside functions."""
    for statement in body:
        yield statement
        if isinstance(statement, ast.If | ast.Try | ast.With):
            for field in ("body", "orelse", "finalbody"):
                yield from _statements(getattr(statement, field, []))
            for handler in getattr(statement, "handlers", []):
                yield from _statements(handler.body)


def _bound_names(statement: ast.stmt) -> list[str]:
    match statement:
        case ast.ClassDef() | ast.FunctionDef() | ast.AsyncFunctionDef():
            return [statement.name]
        case ast.ImportFrom():
            return [alias.asname or alias.name for alias in statement.names]
        case ast.Assign():
            return [target.id for target in statement.targets if isinstance(target, ast.Name)]
        case ast.AnnAssign(target=ast.Name(id=name)):
            return [name]
    return []


def _instance_attribute(cls: ast.ClassDef, name: str) -> ast.stmt | None:
    """A statement in one of the methods that assigns ``self.name``."""
    for method in _statements(cls.body):
        if not isinstance(method, ast.FunctionDef):
            continue
        for node in ast.walk(method):
            if isinstance(node, ast.Assign):
                targets = [leaf for target in node.targets for leaf in ast.walk(target)]
            elif isinstance(node, ast.AnnAssign):
                targets = [node.target]
            else:
                continue
            if any(_is_own_attribute(target, name) for target in targets):
                return node
    return None


def _is_own_attribute(target: ast.AST, name: str) -> bool:
    return (
        isinstance(target, ast.Attribute)
        and target.attr == name
        and isinstance(target.value, ast.Name)
        and target.value.id == "self"
    )


def _define(node: ast.stmt, module: str, name: str) -> Definition:
    if isinstance(node, ast.ClassDef):
        return Definition("class", module, name)
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return Definition("value", module, name)
    decorators = {ast.unparse(decorator) for decorator in node.decorator_list}
    if any(d.endswith("property") for d in decorators):
        return Definition("value", module, name)
    mentions = frozenset(n.id for n in ast.walk(node) if isinstance(n, ast.Name))
    return Definition("function", module, name, tuple(_parameters(node.args)), mentions)


def _parameters(arguments: ast.arguments) -> Iterator[Parameter]:
    positional = [*arguments.posonlyargs, *arguments.args]
    first_default = len(positional) - len(arguments.defaults)
    for index, argument in enumerate(positional):
        yield Parameter(argument.arg, required=index < first_default)
    if arguments.vararg:
        yield Parameter(arguments.vararg.arg, required=False, kind="*")
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        yield Parameter(argument.arg, required=default is None)
    if arguments.kwarg:
        yield Parameter(arguments.kwarg.arg, required=False, kind="**")
