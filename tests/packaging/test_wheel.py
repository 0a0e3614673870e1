"""The built wheel in a clean environment: no sglang, no GPU, and no names but its own."""

import json
import os
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
SOURCES = ("sgl_frspec", "triton_kernels", "pyproject.toml", "README.md", "LICENSE")
# What the wheel depends on, and what that depends on: taken from the running environment.
BORROWED = (
    *("torch", "torchgen", "functorch", "triton", "numpy", "numpy.libs", "safetensors"),
    *("tokenizers", "tqdm", "typing_extensions.py", "sympy", "mpmath", "networkx", "jinja2"),
    *("markupsafe", "filelock", "fsspec", "setuptools", "huggingface_hub", "packaging", "yaml"),
)
HIDDEN = ("sglang", "sgl_kernel", "torchvision", "triton_kernels", "transformers")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """Built from a copy, so that nothing is left in the source tree."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in SOURCES:
        path = ROOT / name
        if path.is_dir():
            shutil.copytree(path, source / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(path, source / name)
    flags = ("--no-deps", "--no-build-isolation", "--wheel-dir", str(out))
    run(sys.executable, "-m", "pip", "wheel", *flags, str(source))
    [wheel] = out.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def clean_python(wheel, tmp_path_factory) -> str:
    """A new environment with the wheel and its dependencies only."""
    folder = tmp_path_factory.mktemp("clean")
    venv.create(folder, with_pip=True)
    python = str(folder / "bin" / "python")
    run(python, "-m", "pip", "install", "--no-deps", "--no-index", str(wheel))
    [packages] = (folder / "lib").glob("python*/site-packages")
    borrowed = folder / "borrowed"
    borrowed.mkdir()
    for name in BORROWED:
        for place in map(Path, sys.path):
            if (place / name).exists() and place.name == "site-packages":
                (borrowed / name).symlink_to(place / name)
                break
    (packages / "borrowed.pth").write_text(f"{borrowed}\n")
    return python


def run(*argv: str, cwd: Path | None = None, check: bool = True) -> subprocess.CompletedProcess:
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME")}
    done = subprocess.run(
        argv, cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )
    assert not check or done.returncode == 0, done.stdout + done.stderr
    return done


def test_contents(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    top = {name.split("/")[0] for name in names}
    assert {name for name in top if not name.endswith(".dist-info")} == {
        "sgl_frspec",
        "frspec_kernels",
    }
    kernel = "sgl_frspec/cpu_engine/stand_ins/kernel/sgl_kernel"
    sources = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "sgl_frspec").rglob("*.py")
        if "__pycache__" not in path.parts
    }
    assert f"{kernel}/tree.py" in names
    assert sources <= set(names), sources - set(names)
    [metadata] = [name for name in names if name.endswith(".dist-info/entry_points.txt")]
    entry_points = zipfile.ZipFile(wheel).read(metadata).decode()
    assert "[sglang.srt.plugins]\nfrspec = sgl_frspec.plugin:register" in entry_points
    assert "frspec = sgl_frspec.cli:main" in entry_points


def test_imports_without_sglang_and_without_a_gpu(clean_python, tmp_path):
    code = f"""
import importlib.util, json
hidden = [name for name in {HIDDEN!r} if importlib.util.find_spec(name)]
import frspec_kernels, sgl_frspec
import sgl_frspec.maps, sgl_frspec.cpu_engine, sgl_frspec.serve, sgl_frspec.plugin
import sgl_frspec.options, frspec_kernels.reduced_topk
import torch
print(json.dumps([hidden, frspec_kernels.__file__, sgl_frspec.__file__, torch.__file__]))
"""
    done = run(clean_python, "-c", code, cwd=tmp_path)
    hidden, *files = json.loads(done.stdout)
    assert hidden == []
    assert all(file.startswith(str(Path(clean_python).parents[1])) for file in files)


def test_command(clean_python, tmp_path):
    command = str(Path(clean_python).parent / "frspec")
    assert run(command, "--version", cwd=tmp_path).stdout.startswith("frspec ")
    done = run(command, "serve", "--model-path", "m", cwd=tmp_path, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("frspec serve: SGLang is not installed: on a GPU machine run")
