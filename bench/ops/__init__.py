"""The operations' entries. Each module has ``OPS``, a tuple of :class:`bench.op.OpSpec`."""

import importlib

from bench.op import OpSpec

MODULES: tuple[str, ...] = ()


def load(wanted: str | None = None) -> list[OpSpec]:
    """Every operation, or those of the module or the operation named ``wanted``.

    Raises:
        ValueError: nothing has that name.
    """
    modules = (wanted,) if wanted in MODULES else MODULES
    ops = [op for stem in modules for op in importlib.import_module(f"bench.ops.{stem}").OPS]
    if wanted is None or wanted in MODULES:
        return ops
    named = [op for op in ops if op.name == wanted]
    if not named:
        known = ", ".join((*MODULES, *(op.name for op in ops)))
        raise ValueError(f"no operation is named {wanted!r}; there are: {known}")
    return named
