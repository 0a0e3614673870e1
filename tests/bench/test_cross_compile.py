import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

import frspec_kernels
from bench.shipped_kernels import describe, kernels_without_specs
from frspec_kernels.compile_spec import CompileSpec
from tests.bench.spilling_kernels import FITS, SPILLS

ROOT = Path(__file__).parents[2]
MODULE = """
from tests.bench.spilling_kernels import BROKEN, FITS, SPILLS, TOO_MUCH_SHARED

def compile_specs():
    return [{specs}]
"""
KERNEL = """
import triton

@triton.jit
def helper(x):
    return x

@triton.jit
def forgotten_kernel(x):
    return helper(x)
"""


def cross_compile(tmp_path, specs, *options):
    """The command on a module that ships ``specs``, without the interpreter of this process."""
    (tmp_path / "shipped.py").write_text(MODULE.format(specs=specs))
    command = [sys.executable, "-m", "bench", "cross-compile", "--module", "shipped", *options]
    paths = os.pathsep.join((str(tmp_path), str(ROOT), str(ROOT / "triton_kernels")))
    environment = os.environ | {"PYTHONPATH": paths, "TRITON_CACHE_DIR": str(tmp_path / "cache")}
    return subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)


def test_a_kernel_that_fits_passes_on_every_target(tmp_path):
    done = cross_compile(tmp_path, "FITS")
    assert done.returncode == 0, done.stderr
    assert "4 compiled" in done.stdout
    assert "0 too large for sm_90, 0 elsewhere" in done.stdout


@pytest.mark.parametrize(
    ("specs", "why"),
    [
        ("FITS, SPILLS", "FAIL spills"),
        ("FITS, TOO_MUCH_SHARED", "FAIL shared memory"),
        ("FITS, BROKEN", "FAIL does not compile for sm_90: undefined_name_kernel"),
    ],
)
def test_a_kernel_that_cannot_be_served_fails_the_run(tmp_path, specs, why):
    done = cross_compile(tmp_path, specs, "--target", "sm_90")
    assert done.returncode == 1
    assert why in done.stdout


def test_spills_elsewhere_are_reported_and_pass(tmp_path):
    done = cross_compile(tmp_path, "SPILLS", "--target", "sm_80")
    assert done.returncode == 0, done.stderr
    assert "spills" in done.stdout
    assert "0 too large for sm_90, 1 elsewhere" in done.stdout


def test_nothing_to_compile_is_a_failure(tmp_path):
    assert cross_compile(tmp_path, "").returncode == 1


def test_every_kernel_of_ours_ships_a_configuration():
    assert kernels_without_specs(frspec_kernels) == []


def test_a_forgotten_kernel_is_named_and_its_helper_is_not(tmp_path, monkeypatch):
    (tmp_path / "forgetful").mkdir()
    (tmp_path / "forgetful" / "__init__.py").write_text("")
    (tmp_path / "forgetful" / "some.py").write_text(KERNEL)
    monkeypatch.syspath_prepend(str(tmp_path))
    package = importlib.import_module("forgetful")
    assert kernels_without_specs(package) == ["forgetful.some.forgotten_kernel"]


@pytest.mark.parametrize(
    "other",
    [
        FITS._replace(num_warps=8),
        FITS._replace(num_stages=1),
        FITS._replace(constexprs={"N": 1024, "REPEATS": None}),
        FITS._replace(signature={"x_ptr": "*bf16:16", "out_ptr": "*fp32:16"}),
    ],
)
def test_descriptions_tell_configurations_apart(other: CompileSpec):
    assert describe(other) != describe(FITS)
    assert describe(FITS) != describe(SPILLS)
