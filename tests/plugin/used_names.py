"""What this package's own source uses of SGLang, read from its syntax trees.

Found are: imported names and their attributes, dotted names in strings (hook targets), methods that
override one of an SGLang base class, attributes of ``self`` that only such a base can provide,
attributes of parameters annotated with an SGLang class and of names that hold its objects, and
SGLang's server arguments.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

from sgl_frspec.source_tree import SourceTree

PACKAGE = Path(__file__).parents[2] / "sgl_frspec"
# Parameters that hold SGLang's objects without saying so: their classes differ by release.
UNANNOTATED = {"factory": ("sglang.srt.speculative.draft_utils", "DraftBackendFactory")}
# Names, of variables and of attributes, that hold an SGLang object wherever SGLang is imported.
_RUNNER = ("sglang.srt.model_executor.model_runner", "ModelRunner")
HOLDERS = {
    "batch": ("sglang.srt.managers.schedule_batch", "ScheduleBatch"),
    "batch_result": ("sglang.srt.managers.utils", "GenerationBatchResult"),
    "draft_input": ("sglang.srt.speculative.eagle_info", "EagleDraftInput"),
    "draft_runner": _RUNNER,
    "forward_batch": ("sglang.srt.model_executor.forward_batch_info", "ForwardBatch"),
    "graph_shared_output": (
        "sglang.srt.model_executor.graph_shared_output",
        "GraphSharedOutput",
    ),
    "model_runner": _RUNNER,
    "target_runner": _RUNNER,
}
# Not part of the engine process: they stand in for other packages, or run SGLang as a command.
OUTSIDE = ("cpu_engine/stand_ins", "contract.py")

Name = tuple[str, str]


def sources() -> list[Path]:
    """The files that may use SGLang."""
    files = sorted(PACKAGE.rglob("*.py"))
    return [f for f in files if not f.relative_to(PACKAGE).as_posix().startswith(OUTSIDE)]


def used_names(source: str, tree: SourceTree) -> set[Name]:
    """(module, dotted name) of everything in SGLang that ``source`` uses."""
    module = ast.parse(source)
    imported = dict(_imports(module, tree))
    used = {name for name in imported.values() if name[1]}
    used |= set(_strings(module))
    if imported:
        used |= set(_of_holders(module))
    for node in ast.walk(module):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            owner = imported.get(node.value.id)
            if owner:
                used.add((owner[0], f"{owner[1]}.{node.attr}".lstrip(".")))
        if isinstance(node, ast.ClassDef):
            used |= set(_of_class(node, imported, tree))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            used |= set(_of_parameters(node, imported))
    return used


def server_arguments(source: str) -> set[str]:
    """Names read from or set on ``server_args``, plainly or through ``getattr``."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Attribute(value=ast.Name(id="server_args"), attr=name):
                found.add(name)
            case ast.Call(
                func=ast.Name(id="getattr"),
                args=[ast.Name(id="server_args"), ast.Constant(value=str(name)), *_],
            ):
                found.add(name)
    return found


def _imports(module: ast.Module, tree: SourceTree) -> Iterator[tuple[str, Name]]:
    for node in ast.walk(module):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "sglang":
            assert node.module
            for alias in node.names:
                local = alias.asname or alias.name
                if tree.find(f"{node.module}.{alias.name}"):
                    yield local, (f"{node.module}.{alias.name}", "")
                else:
                    yield local, (node.module, alias.name)
        if isinstance(node, ast.Import):
            assert not any(a.name.split(".")[0] == "sglang" for a in node.names), (
                "import names from sglang's modules, so that they can be compared with the contract"
            )


def _strings(module: ast.Module) -> Iterator[Name]:
    for node in ast.walk(module):
        text = node.value if isinstance(node, ast.Constant) else None
        if isinstance(text, str) and text.startswith("sglang.srt.") and " " not in text:
            words = text.split(".")
            # Modules are lower case; what comes first in capitals is a class.
            first = next((i for i, word in enumerate(words) if word[:1].isupper()), None)
            if first is not None:
                yield ".".join(words[:first]), ".".join(words[first:])


def _of_holders(module: ast.Module) -> Iterator[Name]:
    for node in ast.walk(module):
        match node:
            case ast.Attribute(
                value=ast.Name(id=holder) | ast.Attribute(attr=holder), attr=name
            ) if holder in HOLDERS:
                yield HOLDERS[holder][0], f"{HOLDERS[holder][1]}.{name}"


def _of_class(cls: ast.ClassDef, imported: dict[str, Name], tree: SourceTree) -> Iterator[Name]:
    bases = [imported[b.id] for b in cls.bases if isinstance(b, ast.Name) and b.id in imported]
    methods = {f.name: f for f in cls.body if isinstance(f, ast.FunctionDef)}
    for module, base in bases:
        for name in methods:
            if tree.find(module, f"{base}.{name}"):
                yield module, f"{base}.{name}"
        assigned = {
            n.attr
            for n in ast.walk(cls)
            if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store)
        }
        for node in ast.walk(cls):
            match node:
                case ast.Attribute(value=ast.Name(id="self"), attr=name) if name not in methods:
                    if name not in assigned or tree.find(module, f"{base}.{name}"):
                        yield module, f"{base}.{name}"


def _of_parameters(
    function: ast.FunctionDef | ast.AsyncFunctionDef, imported: dict[str, Name]
) -> Iterator[Name]:
    owners = {}
    for argument in [*function.args.args, *function.args.kwonlyargs]:
        annotation = argument.annotation
        name = annotation.value if isinstance(annotation, ast.Constant) else None
        name = annotation.id if isinstance(annotation, ast.Name) else name
        owner = imported.get(str(name)) or UNANNOTATED.get(argument.arg)
        if owner:
            owners[argument.arg] = owner
    for node in ast.walk(function):
        match node:
            case ast.Attribute(value=ast.Name(id=variable), attr=name) if variable in owners:
                module, cls = owners[variable]
                yield module, f"{cls}.{name}"
