"""Gains by map size and their picture, from results that are made up."""

import json
from pathlib import Path
from typing import Any

import pytest

from bench.commands.map_sizes import main
from bench.serving.map_size_report import gains


def speed(ms: float, english: float, chinese: float, everything: float) -> dict[str, Any]:
    accept = {"english": english, "chinese": chinese, "all": everything}
    times = {"ms_round": ms, "ms_min": 0.9 * ms, "ms_max": 1.2 * ms}
    return {"turns": 5, **times, "batch_tokens_per_second": 1.0, "accept": accept}


RESULTS: dict[str, Any] = {
    "model": "made up",
    "machine": {"gpu": "none"},
    "batch 1": {
        "nospec": speed(1.0, 1.0, 1.0, 1.0),
        "eagle": speed(4.0, 3.0, 2.0, 2.5),
        "english-1024": speed(2.0, 3.0, 1.0, 2.0),
        "eagle-1024": speed(3.2, 2.9, 1.5, 2.2),
        "frspec-1024": speed(2.0, 2.9, 1.5, 2.25),
        "frspec-2048": speed(2.5, 3.0, 2.0, 2.5),
    },
    "batch 8": {"frspec-1024": speed(3.0, 2.9, 1.5, 2.25)},
    "choice": {
        "predicted": {
            "1024": {"accept": 2.25, "cycle_ms": 2.0},
            "2048": {"accept": 2.5, "cycle_ms": 2.5},
        }
    },
}


def test_gains_are_over_stock_and_over_all_ids():
    first, second = gains(RESULTS).split("\n\n")
    title, headings, small, large = first.splitlines()
    assert title == "batch 1"
    assert headings.split()[-3:] == ["english", "chinese", "all"]
    assert small.split() == ["1,024", "2.000", "0.500", "0.625", "1.800", "96.7%", "75.0%", "90.0%"]
    assert large.split() == ["2,048", "2.500", "0.625", "-", "1.600", "100.0%", "100.0%", "100.0%"]
    # Without stock there is nothing to divide by.
    row = second.splitlines()[2].split()
    assert row == ["1,024", "3.000", "-", "-", "-", "100.0%", "100.0%", "100.0%"]


def test_results_are_shown_and_drawn_without_a_server(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    file = tmp_path / "map_sizes.json"
    file.write_text(json.dumps(RESULTS))
    out = tmp_path / "picture"
    assert main(["--show", str(file), "--out", str(out)]) == 0
    shown = capsys.readouterr().out
    assert gains(RESULTS) in shown
    picture = out / "map_sizes.png"
    assert f"drawn: {picture}" in shown
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert picture.stat().st_size > 20_000  # four panels, not an empty page


def test_results_that_cannot_be_drawn_are_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file = tmp_path / "map_sizes.json"
    file.write_text(json.dumps({"batch 1": {"frspec-8": speed(1.0, 1.0, 1.0, 1.0)}}))
    assert main(["--show", str(file), "--out", str(tmp_path)]) == 0
    assert "not drawn: FRSPEC's rounds were timed at 1 sizes" in capsys.readouterr().out
    file.write_text("{")
    assert main(["--show", str(file), "--out", str(tmp_path)]) == 2
    assert "map_sizes.json holds no results" in capsys.readouterr().out


@pytest.mark.parametrize(
    "text",
    ["[]", '"x"', "{}", '{"batch 1": null}', '{"batch 1": {"frspec-8": {}}}',
     '{"batch 1": {"frspec-8": {"accept": {"all": 1}, "ms_round": null}}}'],
)  # fmt: skip
def test_a_file_of_another_kind_is_refused(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    file = tmp_path / "map_sizes.json"
    file.write_text(text)
    assert main(["--show", str(file), "--out", str(tmp_path)]) == 2
    assert "map_sizes.json holds no results" in capsys.readouterr().out


def test_a_file_in_the_place_of_the_folder_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    file = tmp_path / "map_sizes.json"
    file.write_text(json.dumps(RESULTS))
    assert main(["--show", str(file), "--out", str(file)]) == 2
    assert f"--out {file} is a file; name a folder" in capsys.readouterr().out


@pytest.mark.parametrize("missing", ["model", "machine"])
def test_incomplete_results_are_refused(
    missing: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    file = tmp_path / "map_sizes.json"
    file.write_text(json.dumps({k: v for k, v in RESULTS.items() if k != missing}))
    assert main(["--show", str(file), "--out", str(tmp_path)]) == 2
    assert f"KeyError: '{missing}'" in capsys.readouterr().out
