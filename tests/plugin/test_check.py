"""``frspec check``: its lines, and its exit status."""

import importlib.metadata
from importlib.metadata import version

import pytest

from sgl_frspec import check, cli
from sgl_frspec.contract import NEEDS
from sgl_frspec.contract_check import Drift


def lines(text, subject):
    return [line for line in text.splitlines() if line[4:].startswith(subject)]


def test_this_installation_is_fine(capsys):
    assert cli.main(["check"]) == 0
    out = capsys.readouterr().out
    assert lines(out, "sglang")[0].startswith("ok  ")
    assert version("sglang") in lines(out, "sglang")[0]
    assert version("torch") in lines(out, "torch")[0]
    assert lines(out, "contract") == [f"ok  contract   {len(NEEDS)} attributes as expected"]
    assert lines(out, "plugin")[0].startswith("ok  ")
    assert lines(out, "kernels")[0].startswith("ok  ")


def test_drift_fails_and_is_named(capsys, monkeypatch):
    need = NEEDS[3]
    monkeypatch.setattr(check, "check_contract", lambda *a, **k: [Drift(need, "is missing")])
    assert cli.main(["check"]) == 1
    assert lines(capsys.readouterr().out, "contract") == [f"NO  contract   {need} is missing"]


def test_another_tree_is_checked_where_it_lies(capsys, tmp_path):
    (tmp_path / "sglang/srt").mkdir(parents=True)
    assert cli.main(["check", "--source", str(tmp_path)]) == 1
    missing = lines(capsys.readouterr().out, "contract")
    assert len(missing) == sum(not (need.cpu_only or need.optional) for need in NEEDS)


def test_a_folder_without_sglang_is_an_error(capsys, tmp_path):
    assert cli.main(["check", "--source", str(tmp_path)]) == 1
    assert "holds no sglang/srt" in capsys.readouterr().err


def test_every_attribute_is_listed(capsys):
    assert cli.main(["check", "--list"]) == 0
    out = capsys.readouterr().out
    assert all(f"{need}: {need.use}" in out for need in NEEDS)


@pytest.mark.parametrize(
    ("found", "good"), [("0.5.16", False), ("0.5.17", True), ("0.5.24", False)]
)
def test_versions_outside_the_range_fail(found, good, capsys, monkeypatch):
    real = importlib.metadata.version
    monkeypatch.setattr(check, "version", lambda n: found if n == "sglang" else real(n))
    assert cli.main(["check"]) == (not good)
    assert lines(capsys.readouterr().out, "sglang")[0].startswith("ok" if good else "NO")


def test_a_plugin_that_sglang_would_not_load_is_noticed(capsys, monkeypatch):
    monkeypatch.setenv("SGLANG_PLUGINS", "other")
    assert cli.main(["check"]) == 1
    assert "add frspec" in lines(capsys.readouterr().out, "plugin")[0]
    monkeypatch.setattr(check, "entry_points", lambda group: [])
    assert cli.main(["check"]) == 1
    assert "pip install sgl-frspec" in lines(capsys.readouterr().out, "plugin")[0]
