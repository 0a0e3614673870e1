"""Stand-in modules, loaded by file: as packages they refuse to be imported outside a CPU engine."""

import importlib.util
from types import ModuleType

import pytest

from sgl_frspec.cpu_engine.environment import STAND_INS


def load_stand_in(stem: str) -> ModuleType:
    path = STAND_INS / "kernel" / "sgl_kernel" / f"{stem}.py"
    spec = importlib.util.spec_from_file_location(f"stand_in_{stem}", path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def tree() -> ModuleType:
    return load_stand_in("tree")


@pytest.fixture(scope="session")
def slots() -> ModuleType:
    return load_stand_in("slots")


@pytest.fixture(scope="session")
def kv_copy() -> ModuleType:
    return load_stand_in("kv_copy")
