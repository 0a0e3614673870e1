"""The one command: stages in order, what is skipped, what a failure leaves. Nothing is served."""

import argparse
import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from bench.commands.map_sizes import parse_arguments
from bench.serving.variants import parse_variants
from examples.gemma3_270m import __main__ as command
from examples.gemma3_270m import stages as module
from examples.gemma3_270m.stages import (
    DRAFT_TOKENS,
    Comparison,
    Folders,
    Stage,
    StageFailedError,
    best_size,
    compare_command,
    rank,
    run_stage,
    serve_flags,
    stages,
)
from sgl_frspec.maps.commands.rank import add_parser as add_rank_parser

NAMES = ["model", "text", "maps", "draft", "compare", "evaluate"]


def writes(path: Path, text: str = "x") -> list[str]:
    code = f"open({str(path)!r}, 'a').write({text!r})"
    return [sys.executable, "-c", code]


def test_a_stage_that_is_done_is_not_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    out, log = tmp_path / "out", tmp_path / "log"
    stage = Stage("text", "writes", [writes(out, "a"), writes(out, "b")], out.exists)
    run_stage(stage, log, "1/1")
    run_stage(stage, log, "1/1")
    assert out.read_text() == "ab"
    [row] = [json.loads(line) for line in log.read_text().splitlines()]
    assert row["stage"] == "text"
    assert 0 <= row["seconds"] < 60
    assert capsys.readouterr().out.splitlines()[-1] == "1/1 text: done before"


def test_a_failure_names_its_command_and_stops(tmp_path: Path):
    out = tmp_path / "out"
    fails = [sys.executable, "-c", "raise SystemExit(4)"]
    stage = Stage("draft", "fails", [fails, writes(out)], out.exists)
    with pytest.raises(StageFailedError, match="draft failed with status 4"):
        run_stage(stage, tmp_path / "log", "1/1")
    assert not out.exists()
    assert not (tmp_path / "log").exists()


def test_a_prediction_that_was_off_is_no_failure(tmp_path: Path):
    off = [sys.executable, "-c", "raise SystemExit(3)"]
    run_stage(Stage("compare", "", [off], lambda: False), tmp_path / "log", "1/1")
    with pytest.raises(StageFailedError):
        run_stage(Stage("evaluate", "", [off], lambda: False), tmp_path / "log", "1/1")


def test_what_each_stage_waits_for(tmp_path: Path):
    folders = Folders(tmp_path / "model", tmp_path)
    made = {s.name: s for s in stages(folders, None, command.SETTINGS, ())}
    assert list(made) == NAMES
    assert not any(stage.is_done() for stage in made.values())
    for name in ("train.safetensors", "eval.safetensors"):
        (tmp_path / name).touch()
    assert made["text"].is_done()
    for name in ("weighted.safetensors", "english.safetensors", "prompts.jsonl"):
        (tmp_path / name).touch()
    assert made["maps"].is_done()
    folders.draft.mkdir()
    (folders.draft / "model.safetensors").touch()
    (tmp_path / "run_log.jsonl").write_text('{"event": "check"}\n')
    assert not made["draft"].is_done()  # a broken training leaves its best draft
    with (tmp_path / "run_log.jsonl").open("a") as log:
        log.write('{"stage": "train", "seconds": 75}\n')
    assert made["draft"].is_done()
    results = tmp_path / "compare" / "map_sizes.json"
    results.parent.mkdir()
    results.write_text(json.dumps({"choice": {"best_served": 65536}}))
    assert not made["compare"].is_done()  # its first figures only
    results.write_text(json.dumps({"choice": {"best_served": 65536}, "finished": True}))
    assert made["compare"].is_done()
    assert best_size(folders) == 65536


def test_the_commands_are_ones_that_exist(tmp_path: Path):
    folders = Folders(tmp_path / "model", tmp_path)
    comparison = Comparison(**json.loads(command.SETTINGS.read_text())["comparison"])
    words = compare_command(folders, comparison, ["--alternations", "7"])
    args = parse_arguments(words[4:])
    assert args.target == folders.model
    assert args.sizes == ["8k", "16k", "32k", "64k", "128k", "full"]
    assert args.alternations == 7
    assert args.check_text
    assert args.batch == [1, 8]
    [*_, english] = parse_variants(args.variant)
    assert english.flags == (
        *("--speculative-token-map", str(folders.token_map("english"))),
        *("--frspec-map-size", "32768"),
    )

    parser = argparse.ArgumentParser()
    add_rank_parser(parser.add_subparsers())
    for name, weights in (("weighted", module.WEIGHTED), ("english", module.ENGLISH)):
        assert sum(weights.values()) == 100
        parser.parse_args(rank(folders, name, weights)[3:])

    modules = {c[2] for s in stages(folders, None, command.SETTINGS, ()) for c in s.commands}
    assert len(modules) == 6
    assert all(importlib.util.find_spec(name) for name in modules)


def test_the_best_measured_size_is_served(tmp_path: Path):
    flags = serve_flags(Folders(Path("m"), tmp_path), 16384)
    assert flags[flags.index("--frspec-map-size") + 1] == "16384"
    assert flags[flags.index("--speculative-num-draft-tokens") + 1] == str(DRAFT_TOKENS)


def test_the_command_runs_the_chosen_stages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    out = tmp_path / "out"

    def fakes(*_: object) -> list[Stage]:
        return [Stage(name, "", [writes(out, name + " ")], lambda: False) for name in NAMES]

    monkeypatch.setattr(command, "stages", fakes)
    words = ["--work", str(tmp_path / "work"), "--until", "draft", "--skip", "text"]
    assert command.main(words) == 0
    assert out.read_text() == "model maps draft "
    assert "frspec serve --model-path" in capsys.readouterr().out

    def failing(*_: object) -> list[Stage]:
        return [Stage(n, "", [[sys.executable, "-c", "exit(1)"]], lambda: False) for n in NAMES]

    monkeypatch.setattr(command, "stages", failing)
    assert command.main(words) == 1
    assert "stage model failed" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--settings", "missing.json"], "--settings missing.json: FileNotFoundError"),
        (["--compare", "--tokens 'abc"], "No closing quotation"),
        (["--compare", "--out elsewhere"], "--compare --out: run `python -m bench map-sizes`"),
        (["--compare=--show=file"], "--compare --show"),
        (["--work", __file__], "File exists"),
    ],
)
def test_bad_words_are_refused_before_the_first_stage(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert command.main(["--work", str(tmp_path), "--model", str(tmp_path / "m"), *words]) == 2
    assert message in capsys.readouterr().err
    assert not any(tmp_path.iterdir())


def test_wrong_flags_of_the_comparison_are_refused_before_the_first_stage(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    with pytest.raises(SystemExit, match="2"):
        command.main(["--work", str(tmp_path), "--compare", "--nonsense 3"])
    assert "unrecognized arguments: --nonsense 3" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("comparison", "message"),
    [
        (None, "KeyError"),
        ([], "TypeError"),
        ({"sizes": ["8k"]}, "missing 3 required"),
        ({"sizes": "8k"}, 'write sizes as ["16k", "full"]'),
        ({"stock_sizes": [8192]}, 'write sizes as ["16k", "full"]'),
        ({"tokens": 0}, "other_size and tokens are numbers above 0"),
        ({"new": 1}, "unexpected keyword argument 'new'"),
    ],
)
def test_settings_of_another_kind_are_refused(comparison: object, message: str, tmp_path: Path):
    good = {"sizes": ["8k"], "stock_sizes": ["8k"], "other_size": 8192, "tokens": 16}
    if isinstance(comparison, dict) and comparison != {"sizes": ["8k"]}:
        comparison = good | comparison
    file = tmp_path / "settings.json"
    file.write_text(json.dumps({} if comparison is None else {"comparison": comparison}))
    with pytest.raises(ValueError, match=re.escape(message)):
        Comparison.read(file)


def test_a_stage_without_what_it_needs_says_who_makes_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    words = ["--work", str(tmp_path), "--model", str(tmp_path / "m"), "--skip", "model"]
    assert command.main([*words, "--until", "text"]) == 1
    said = capsys.readouterr().err
    assert f"stage text needs {tmp_path / 'm' / 'config.json'}, which stage model makes" in said


def test_damaged_records_of_earlier_runs(tmp_path: Path):
    folders = Folders(tmp_path / "model", tmp_path)
    made = {s.name: s for s in stages(folders, None, command.SETTINGS, ())}
    folders.draft.mkdir()
    (folders.draft / "model.safetensors").touch()
    # A kill while a row was written leaves a part of it.
    (tmp_path / "run_log.jsonl").write_text('{"stage": "train", "seconds": 75}\n{"sta')
    assert made["draft"].is_done()
    results = tmp_path / "compare" / "map_sizes.json"
    results.parent.mkdir()
    for text in ("", "{", "[]"):
        results.write_text(text)
        with pytest.raises(StageFailedError, match=r"map_sizes\.json .*delete it"):
            made["compare"].is_done()


def test_the_command_line_answers_without_torch():
    code = "import sys, examples.gemma3_270m.__main__; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
