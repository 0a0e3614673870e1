"""The stand-ins exist in CPU engine processes only, and step back before anything real."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from sgl_frspec import cpu_engine
from sgl_frspec.cpu_engine.environment import STAND_INS, cpu_environment

KERNEL, VISION = str(STAND_INS / "kernel"), str(STAND_INS / "vision")


def python(code: str, path: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    base = {k: v for k, v in os.environ.items() if k not in ("SGLANG_USE_CPU_ENGINE", "PYTHONPATH")}
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**base, "PYTHONPATH": os.pathsep.join(path), **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def fake_package(folder: Path, name: str) -> Path:
    (folder / name).mkdir(parents=True)
    (folder / name / "__init__.py").write_text("REAL = True\n")
    return folder


@pytest.mark.parametrize(("name", "folder"), [("sgl_kernel", KERNEL), ("torchvision", VISION)])
def test_importable_in_a_cpu_engine_process_only(name, folder):
    inside = python(f"import {name}; print({name}.__file__)", [folder], SGLANG_USE_CPU_ENGINE="1")
    assert inside.stdout.strip().startswith(str(STAND_INS))
    outside = python(f"import {name}", [folder])
    assert outside.returncode
    assert "SGLANG_USE_CPU_ENGINE is not 1" in outside.stderr
    without_path = python(f"import {name}; print({name}.__file__)", [], SGLANG_USE_CPU_ENGINE="1")
    assert str(STAND_INS) not in without_path.stdout


def test_refuses_beside_cuda():
    code = "import torch; torch.cuda.is_available = lambda: True; import sgl_kernel"
    done = python(code, [KERNEL], SGLANG_USE_CPU_ENGINE="1")
    assert "ImportError: CUDA is available" in done.stderr
    assert KERNEL in done.stderr


def test_refuses_beside_a_real_kernel_package(tmp_path):
    real = fake_package(tmp_path, "sgl_kernel")
    done = python("import sgl_kernel", [KERNEL, str(real)], SGLANG_USE_CPU_ENGINE="1")
    assert f"a real sgl_kernel is installed at {tmp_path}" in done.stderr


def test_missing_operators_name_themselves():
    code = "import sgl_kernel\nf = sgl_kernel.fused_experts_cpu\nf(1)"
    done = python(code, [KERNEL], SGLANG_USE_CPU_ENGINE="1")
    assert "NotImplementedError: sgl_kernel.fused_experts_cpu" in done.stderr
    code = "from torchvision.transforms import functional\nfunctional.resize(1)"
    done = python(code, [VISION], SGLANG_USE_CPU_ENGINE="1")
    assert "NotImplementedError: torchvision.transforms.functional.resize" in done.stderr


def test_environment_is_a_copy_with_the_stand_ins_first():
    base = {"PYTHONPATH": "/somewhere", "KEPT": "yes", "CUDA_VISIBLE_DEVICES": "3"}
    made = cpu_environment(base)
    assert base == {"PYTHONPATH": "/somewhere", "KEPT": "yes", "CUDA_VISIBLE_DEVICES": "3"}
    assert made["PYTHONPATH"].split(os.pathsep)[0] == KERNEL
    assert made["PYTHONPATH"].split(os.pathsep)[-1] == "/somewhere"
    assert made["KEPT"] == "yes"
    assert made["SGLANG_USE_CPU_ENGINE"] == "1"
    assert made["CUDA_VISIBLE_DEVICES"] == ""
    assert cpu_environment(made) == made


def test_environment_is_refused_in_a_gpu_installation(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(fake_package(tmp_path, "sgl_kernel")))
    with pytest.raises(ValueError, match=rf"sgl_kernel is installed at {tmp_path}.*GPU environ"):
        cpu_environment({})


def test_an_installed_torchvision_is_left_alone(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(fake_package(tmp_path, "torchvision")))
    assert VISION not in cpu_environment({})["PYTHONPATH"].split(os.pathsep)


def test_registration_does_nothing_elsewhere(monkeypatch):
    monkeypatch.delenv("SGLANG_USE_CPU_ENGINE", raising=False)
    before = set(sys.modules)
    cpu_engine.register()
    assert not {name for name in set(sys.modules) - before if name.startswith("sglang")}


def test_registration_refuses_cuda(monkeypatch):
    monkeypatch.setenv("SGLANG_USE_CPU_ENGINE", "1")
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    with pytest.raises(RuntimeError, match="SGLANG_USE_CPU_ENGINE=1 on a machine with CUDA"):
        cpu_engine.register()
