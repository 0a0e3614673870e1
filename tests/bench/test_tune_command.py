from functools import partial

import pytest
import torch

from bench import ops, timing
from bench.__main__ import main
from bench.commands import tune
from tests.bench.toy import SMALL_CASES, toy_op


@pytest.fixture
def toy(monkeypatch):
    op = toy_op()
    monkeypatch.setattr(ops, "load", lambda wanted=(): ([op], []))
    return op


def test_needs_a_gpu(toy, monkeypatch, capsys):
    monkeypatch.setattr(tune, "pick_device", lambda: torch.device("cpu"))
    assert main(["tune", "--op", "double"]) == 2
    assert "needs a GPU" in capsys.readouterr().err


def test_no_configurations_to_print_is_a_bad_request(toy, monkeypatch, capsys):
    monkeypatch.setattr(tune, "pick_device", lambda: torch.device("cuda"))
    assert main(["tune", "--op", "double", "--top", "0"]) == 2
    assert "--top is 0; give 1 or more" in capsys.readouterr().err


def test_a_case_that_nothing_has_is_a_bad_request(toy, monkeypatch, capsys):
    monkeypatch.setattr(tune, "pick_device", lambda: torch.device("cuda"))
    assert main(["tune", "--op", "double", "--case", "rows64", "--case", "rows77"]) == 2
    assert "no case contains rows77;" in capsys.readouterr().err


def test_wrong_configurations_are_left_out_and_the_others_sorted_by_time(toy, monkeypatch, capsys):
    """The toy doubles; of its factors 2 is right, whatever it is called."""
    monkeypatch.setattr(timing, "l2_bytes", lambda: 1)

    def by_name(thunks, touched, effort):
        return {name: timing.Timing(1.0, float(len(name)), 9.0) for name in thunks}

    monkeypatch.setattr(timing, "time_interleaved", by_name)
    tuning = tune.Tuning(lambda case: ("**", 3, "*"), _of_the_toy)
    tune._sweep(toy, tuning, SMALL_CASES[0], torch.device("cpu"), 1, timing.QUICK)
    captured = capsys.readouterr()
    assert captured.out == (
        "# double rows2-H16-fp32: 2 of 3 configurations timed\n'*',  # 3.00 µs\n"
    )
    assert captured.err.startswith("# left out: 3: result: 32 of 32 values out of bound")


def test_a_capture_that_cannot_be_ended_ends_the_sweep(toy, monkeypatch, capsys):
    def broken(thunks, touched, effort):
        error = timing.CaptureBrokenError("RuntimeError: synchronises")
        error.provider = next(iter(thunks))
        raise error

    monkeypatch.setattr(tune, "pick_device", lambda: torch.device("cuda"))
    monkeypatch.setattr(timing, "l2_bytes", lambda: 1)
    monkeypatch.setattr(timing, "time_interleaved", broken)
    monkeypatch.setattr(tune, "_sweep", partial(_on_the_cpu, tune._sweep))
    assert main(["tune", "--op", "double"]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "ERROR double rows1-H64-fp32: 2.0 is not capturable in a CUDA graph: " in captured.err
    assert captured.err.endswith("RuntimeError: synchronises\n")


def _on_the_cpu(sweep, op, tuning, case, device, top, effort):
    sweep(op, tuning, case, torch.device("cpu"), top, effort)


def _of_the_toy(inputs, config):
    return lambda: inputs["x"] * (2 if isinstance(config, str) else config)


@pytest.mark.gpu
def test_times_configurations(toy, capsys):
    assert main(["tune", "--op", "double", "--case", "rows64", "--quick"]) == 0
    captured = capsys.readouterr()
    assert "1 of 2 configurations timed" in captured.out
    assert "left out: 3.0" in captured.err
