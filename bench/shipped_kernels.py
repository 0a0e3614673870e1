"""Which kernels a package has, which configurations of them it ships, and what it forgot."""

import ast
import importlib
import inspect
import pkgutil
from types import ModuleType
from typing import Any

from frspec_kernels.compile_spec import CompileSpec

Key = tuple[str, str]  # kernel, configuration in words


def describe(spec: CompileSpec) -> str:
    """The configuration of ``spec`` in one line; no two shipped ones share it."""
    types = [kind for kind in spec.signature.values() if kind.startswith("*")]
    names = dict.fromkeys(kind.removeprefix("*").removesuffix(":16") for kind in types)
    plain = [f"{key}={name_of(value)}" for key, value in spec.constexprs.items()]
    absent = [f"no {key}" for key, value in spec.constexprs.items() if value is None]
    shown = [text for text in plain if not text.endswith("=None")]
    launch = f"warps={spec.num_warps} stages={spec.num_stages}"
    return " ".join((",".join(names), *shown, *absent, launch))


def name_of(value: Any) -> str:
    """A constexpr as text: functions by name."""
    return getattr(value, "__name__", str(value))


def specs_of(module_names: list[str]) -> dict[Key, tuple[str, CompileSpec]]:
    """(kernel, configuration) -> (module, spec), over ``compile_specs()`` of the modules.

    Equal specs of several modules are kept once.

    Raises:
        ValueError: two different specs that :func:`describe` cannot tell apart.
    """
    found: dict[Key, tuple[str, CompileSpec]] = {}
    for name in module_names:
        for spec in importlib.import_module(name).compile_specs():
            key = spec.kernel.__name__, describe(spec)
            if key in found and _content(found[key][1]) != _content(spec):
                key = key[0], f"{key[1]} {dict(spec.signature)}"
            found.setdefault(key, (name, spec))
    return found


def _content(spec: CompileSpec) -> tuple[Any, ...]:
    return spec._replace(signature=dict(spec.signature), constexprs=dict(spec.constexprs))


def modules_of(package: ModuleType) -> list[ModuleType]:
    """Every module of ``package``."""
    found = pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
    return [importlib.import_module(module.name) for module in found]


def modules_with_specs(package: ModuleType) -> list[str]:
    """Names of the modules of ``package`` that define ``compile_specs``."""
    return [
        module.__name__
        for module in modules_of(package)
        if getattr(getattr(module, "compile_specs", None), "__module__", "") == module.__name__
    ]


def kernels_without_specs(package: ModuleType) -> list[str]:
    """``module.kernel`` of each kernel of ``package`` that no ``compile_specs()`` lists.

    A kernel is a ``@triton.jit`` function that no other ``@triton.jit`` function refers to.
    """
    functions = {(m.__name__, f.name): f for m in modules_of(package) for f in _jit_functions(m)}
    inner = {name for (_, own), f in functions.items() for name in _names_in(f) - {own}}
    listed = {kernel for kernel, _ in specs_of(modules_with_specs(package))}
    return [
        f"{module}.{name}" for module, name in functions if name not in inner and name not in listed
    ]


def _jit_functions(module: ModuleType) -> list[ast.FunctionDef]:
    tree = ast.parse(inspect.getsource(module))
    functions = (node for node in tree.body if isinstance(node, ast.FunctionDef))
    return [f for f in functions if any(_is_jit(mark) for mark in f.decorator_list)]


def _is_jit(decorator: ast.expr) -> bool:
    bare = decorator.func if isinstance(decorator, ast.Call) else decorator
    return ast.unparse(bare) == "triton.jit"


def _names_in(function: ast.FunctionDef) -> set[str]:
    return {node.id for node in ast.walk(function) if isinstance(node, ast.Name)}
