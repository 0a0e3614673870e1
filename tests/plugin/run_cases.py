"""Run test files in a process where SGLang can be imported without a GPU."""

import ast
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from xml.etree import ElementTree

from sgl_frspec.cpu_engine.environment import cpu_environment

ROOT = Path(__file__).parents[2]


def case_names(files: Iterable[Path]) -> list[str]:
    """The test functions in ``files``."""
    statements = [node for file in files for node in ast.parse(file.read_text()).body]
    names = [node.name for node in statements if isinstance(node, ast.FunctionDef)]
    return [name for name in names if name.startswith("test_")]


def complaints(files: Iterable[Path], report: Path) -> dict[str, list[str]]:
    """What went wrong in each test function that ran; ``report`` is written."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    environment = {**cpu_environment(os.environ), "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [*command, f"--junitxml={report}", *map(str, files)],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert report.exists(), done.stdout + done.stderr
    found: dict[str, list[str]] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        said = [child.text or child.tag for child in case if child.tag != "system-out"]
        found.setdefault(case.attrib["name"].partition("[")[0], []).extend(said)
    return found
