import csv
import json
import sys
from dataclasses import asdict, replace
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch

from bench import ops, supervisor
from bench.__main__ import main
from bench.checks import equal
from bench.commands import kernels
from bench.op import Case
from bench.runner import CaseRun, Row
from tests.bench.toy import provider, raises, toy_op

CPU = torch.device("cpu")
CASES = [Case(rows=rows, H=16, dtype="fp32") for rows in (1, 2)]
SMALL = Case(rows=2, H=16, dtype="fp32")


@pytest.fixture
def registered(monkeypatch):
    """Makes the toy the only operation, and the CPU the device."""

    def register(**more):
        monkeypatch.setattr(ops, "load", lambda wanted=(): ([toy_op(**more)], []))
        monkeypatch.setattr(kernels, "pick_device", lambda: CPU)

    return register


def test_right_providers_exit_zero_and_say_that_nothing_is_timed(registered, capsys):
    registered(ours=provider(lambda x: x * 2))
    assert main(["kernels"]) == 0
    out = capsys.readouterr().out
    assert "times nothing" in out
    assert "2 of 2 results right" in out


@pytest.mark.parametrize("wrong", [lambda x: x * 2.001, lambda x: x * torch.nan, lambda x: x[:1]])
def test_a_wrong_provider_fails_the_run(registered, capsys, wrong):
    registered(ours=provider(wrong))
    assert main(["kernels"]) == 1
    assert "FAIL" in capsys.readouterr().out


def test_a_raising_provider_fails_the_run_and_the_others_go_on(registered, capsys):
    registered(ours=provider(raises), other=provider(lambda x: x * 2))
    assert main(["kernels"]) == 1
    captured = capsys.readouterr()
    assert "RuntimeError: no kernel image" in captured.out
    assert "2 of 3 results right" in captured.out


def test_an_absent_provider_says_why_and_fails_nothing(registered, capsys):
    absent = provider(raises, missing=lambda case: "peer is not installed")
    registered(ours=provider(lambda x: x * 2), peer=absent)
    assert main(["kernels"]) == 0
    assert "absent: peer: peer is not installed (1 cases)" in capsys.readouterr().out


def test_a_run_that_checked_nothing_does_not_pass(registered, capsys):
    registered(peer=provider(raises, missing=lambda case: "peer is not installed"))
    assert main(["kernels", "--provider", "peer"]) == 2
    assert "nothing was checked" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--case", "rows77"], "no case contains rows77;"),
        (["--case", "rows2", "--case", "rows77"], "no case contains rows77;"),
        (["--provider", "nobody"], "nobody"),
        (["--time-limit", "nan"], "--time-limit is nan; give seconds"),
        (["--time-limit", "-1"], "--time-limit is -1.0; give seconds"),
    ],
)
def test_bad_requests_exit_two(registered, capsys, argv, message):
    registered()
    assert main(["kernels", *argv]) == 2
    assert message in capsys.readouterr().err


def test_unknown_operation_names_the_known_ones(capsys):
    assert main(["kernels", "--op", "nothing"]) == 2
    assert "nothing" in capsys.readouterr().err


@pytest.fixture
def broken_entry(monkeypatch, tmp_path):
    """An entry module beside the real ones that does not import."""
    (tmp_path / "fragile.py").write_text("import a_package_nobody_has\n")
    (tmp_path / "_shared.py").write_text("raise RuntimeError\n")
    monkeypatch.setattr(ops, "__path__", [str(tmp_path)])


def test_an_entry_that_cannot_be_imported_fails_the_run(broken_entry, capsys):
    assert ops.stems() == ["fragile"]
    assert main(["kernels"]) == 1
    assert "ERROR bench/ops/fragile.py: ModuleNotFoundError" in capsys.readouterr().err


def test_an_entry_that_cannot_be_imported_stops_no_other(broken_entry, monkeypatch, capsys):
    whole = SimpleNamespace(OPS=(toy_op(),))
    monkeypatch.setattr(ops, "stems", lambda: ["fragile", "whole"])
    monkeypatch.setitem(sys.modules, "bench.ops.whole", whole)
    monkeypatch.setattr(kernels, "pick_device", lambda: CPU)  # a worker would not see the toy
    assert main(["kernels"]) == 1
    captured = capsys.readouterr()
    assert "1 of 1 results right" in captured.out
    assert "fragile" in captured.err


def test_every_entry_of_the_repository_imports():
    loaded, broken = ops.load()
    assert broken == []
    assert len({op.name for op in loaded}) == len(loaded)
    assert [op.name for op in ops.load(["norm"])[0]] == [
        op.name for op in loaded if "norm" in op.name
    ]
    assert [op.name for op in ops.load(["add_rms_norm"])[0]] == ["add_rms_norm"]


def test_several_entries_and_operations_are_loaded_together():
    loaded, broken = ops.load(["add_rms_norm", "reduced_topk"])
    assert ([op.name for op in loaded], broken) == (["add_rms_norm", "reduced_topk"], [])
    with pytest.raises(ValueError, match="no operation is named nobody; there are: "):
        ops.load(["reduced_topk", "nobody"])


def test_operations_take_turns_under_a_time_limit():
    first, second = toy_op(CASES), replace(toy_op(CASES[:1]), name="other")
    names = [op.name for op, _ in kernels._work([first, second], False, "", True)]
    assert names == ["double", "other", "double"]
    names = [op.name for op, _ in kernels._work([first, second], False, "", False)]
    assert names == ["double", "double", "other"]


class _OutOfTime:
    machine: ClassVar[dict] = {"gpu": "one"}
    undone = 2

    def __init__(self, work, *options):
        self.work = work

    def results(self):
        op, case = self.work[0]
        yield [Row(op.name, case.id, "torch", "ok", 1.0, 0.9, 1.1, floor_us=0.5)]


def test_running_out_of_time_is_told_apart_from_success(registered, monkeypatch, capsys):
    registered()
    monkeypatch.setattr(kernels, "pick_device", lambda: torch.device("cuda"))
    monkeypatch.setattr(supervisor, "Supervisor", _OutOfTime)
    assert main(["kernels", "--time-limit", "1"]) == 3
    assert "2 cases not run: time limit" in capsys.readouterr().err


def test_a_time_limit_holds_without_a_gpu_too(registered, capsys):
    registered(small_cases=CASES)
    assert main(["kernels", "--time-limit", "0"]) == 3
    captured = capsys.readouterr()
    assert "0 of 0 results right" in captured.out
    assert "2 cases not run: time limit" in captured.err
    assert main(["kernels", "--time-limit", "600"]) == 0
    assert "2 of 2 results right" in capsys.readouterr().out


def test_a_folder_that_cannot_be_written_is_named_before_anything_runs(
    registered, tmp_path, capsys
):
    registered(ours=provider(raises))
    (tmp_path / "file").write_text("")
    for out in (tmp_path / "file", tmp_path / "file" / "below"):
        assert main(["kernels", "--out", str(out)]) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err.startswith(f"cannot write to --out {out}: ")
        assert captured.err.count("\n") == 1


def test_list_shows_cases_and_runs_none(registered, capsys):
    registered(ours=provider(raises))
    assert main(["kernels", "--list"]) == 0
    out = capsys.readouterr().out
    assert "rows64-H64-fp32" in out
    assert "torch, ours (baseline torch)" in out


def test_provider_and_case_select(registered, capsys):
    registered(ours=provider(raises))
    assert main(["kernels", "--provider", "torch", "--case", "rows2"]) == 0
    assert "1 of 1 results right" in capsys.readouterr().out


def test_cases_add_up_in_the_entrys_order(registered, capsys):
    registered(small_cases=CASES)
    wanted = ["--case", CASES[-1].id, "--case", CASES[0].id]
    assert main(["kernels", "--provider", "torch", *wanted]) == 0
    out = capsys.readouterr().out
    assert "2 of 2 results right" in out
    assert out.index(CASES[0].id) < out.index(CASES[-1].id)


def test_files_hold_every_row_and_the_machine(registered, tmp_path):
    registered(ours=provider(lambda x: x * 3))
    assert main(["kernels", "--out", str(tmp_path)]) == 1
    rows = list(csv.DictReader((tmp_path / "kernels.csv").open()))
    assert [(r["provider"], r["status"], r["us_p50"]) for r in rows] == [
        ("torch", "ok", ""),
        ("ours", "FAIL", ""),
    ]
    assert rows[0]["torch"] == torch.__version__
    machine = json.loads((tmp_path / "kernels.json").read_text())["machine"]
    assert set(machine) == {"gpu", "driver", "torch", "triton", "git_sha", "kernels", "date"}


def test_a_context_provider_is_checked_by_its_own_rule():
    own = provider(lambda x: x * 3, check=lambda out, inputs: equal(out, inputs["x"] * 3))
    (row,) = CaseRun(toy_op(ours=own), SMALL, CPU, ["ours"]).rows()
    assert row.status == "ok"


def test_in_place_providers_do_not_see_each_others_inputs():
    op = toy_op(ours=provider(lambda x: x.mul_(2)), again=provider(lambda x: x.mul_(2)))
    assert [row.status for row in CaseRun(op, SMALL, CPU).rows()] == ["ok"] * 3


@pytest.mark.gpu
def test_no_time_for_a_red_check():
    rows = _gpu_rows(ours=provider(lambda x: x * 3))
    assert rows["ours"]["status"] == "FAIL"
    assert rows["ours"]["us_p50"] is None
    assert rows["ours"]["speedup"] is None
    assert rows["torch"]["us_p50"] > 0


@pytest.mark.gpu
def test_times_have_spread_floor_and_speedup():
    row = _gpu_rows(ours=provider(lambda x: x * 2))["ours"]
    assert 0 < row["us_p20"] <= row["us_p50"] <= row["us_p80"]
    assert row["gb_s"] == pytest.approx(8 * 64 * 64 / row["us_p50"] / 1e3)
    assert row["pct_peak"] == pytest.approx(100 * row["floor_us"] / row["us_p50"])
    assert row["speedup"] > 0


def _gpu_rows(**more) -> dict[str, dict]:
    case = Case(rows=64, H=64, dtype="fp32")
    rows = CaseRun(toy_op(**more), case, torch.device("cuda")).rows()
    return {row.provider: asdict(row) for row in rows}
