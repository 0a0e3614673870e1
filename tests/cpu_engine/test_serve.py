"""Which command ``frspec serve`` becomes."""

import sys

import pytest

from sgl_frspec import cli, serve
from sgl_frspec.cpu_engine.environment import STAND_INS


def test_on_a_gpu_nothing_is_added():
    base = {"PATH": "/bin"}
    command = serve.server_command(["--model-path", "m", "--tp=2"], base, gpu=True)
    expected = [sys.executable, "-m", "sglang.launch_server", "--model-path", "m", "--tp=2"]
    assert command.argv == expected
    assert command.environment == base
    assert command.device == "gpu"


def test_on_a_cpu_the_engine_is_enabled_and_defaults_fill_in():
    command = serve.server_command(["--model-path", "m", "--dtype=bfloat16"], {}, gpu=False)
    added = command.argv[command.argv.index("--dtype=bfloat16") + 1 :]
    assert added == [
        *("--device", "cpu"),
        *("--attention-backend", "frspec_cpu"),
        *("--sampling-backend", "pytorch"),
        "--disable-overlap-schedule",
        *("--max-total-tokens", "16384"),
    ]
    assert command.environment["SGLANG_USE_CPU_ENGINE"] == "1"
    assert str(STAND_INS) in command.environment["PYTHONPATH"]


@pytest.mark.parametrize("present", [True, False])
def test_the_device_flag_decides_then_the_machine(monkeypatch, present):
    monkeypatch.setattr("torch.accelerator.is_available", lambda: present)
    device = {flags: serve.server_command(flags, {}).device for flags in [(), ("--device", "cpu")]}
    assert device == {(): "gpu" if present else "cpu", ("--device", "cpu"): "cpu"}
    assert serve.server_command(["--device=cuda"], {}).device == "gpu"


def test_without_sglang(monkeypatch):
    monkeypatch.setitem(sys.modules, "sglang", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"SGLang is not installed.*sgl-frspec\[gpu\]"):
        serve.server_command([], {}, gpu=True)


def test_the_command_line_hands_every_flag_on(monkeypatch):
    executed = []
    monkeypatch.setattr("os.execve", lambda *call: executed.append(call))
    flags = ["--model-path", "m", "-h", "--frspec-map-size=16384", "--device", "cuda"]
    cli.main(["serve", *flags])
    [(program, argv, _)] = executed
    assert program == sys.executable
    assert argv[3:] == flags
