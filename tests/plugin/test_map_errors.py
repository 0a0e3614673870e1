"""Wrong maps, given to a real server command: refused before weights load, with the remedy."""

import os
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from sgl_frspec.cpu_engine.environment import cpu_environment
from sgl_frspec.maps import MapMetadata, TokenMap, save_token_map
from tests.plugin.conftest import ROOT

IDS = list(range(2, 130))


class RunsCode:
    """Its pickle makes a file when it is executed."""

    def __init__(self, victim: Path) -> None:
        self.victim = victim

    def __reduce__(self):
        return Path.touch, (self.victim,)


def torch_file(content):
    return lambda path: torch.save(content, path.with_suffix(".pt"))


def safetensors_file(ids):
    return lambda path: save_file({"ids": np.asarray(ids)}, path.with_suffix(".safetensors"))


def truncated(path):
    save_token_map(TokenMap(np.arange(300)), path.with_suffix(".safetensors"))
    file = path.with_suffix(".safetensors")
    file.write_bytes(file.read_bytes()[:-100])


def for_another_tokenizer(path):
    metadata = MapMetadata(vocab_size=512, tokenizer_fingerprint="ab" * 32, tokenizer="another")
    save_token_map(TokenMap(np.arange(300), None, metadata), path.with_suffix(".safetensors"))


def hostile_pickle(path):
    path.with_suffix(".pt").write_bytes(pickle.dumps(RunsCode(path.with_name("executed"))))


# How to write it, and what the message must say.
WRONG = {
    "missing": (lambda path: None, ["does not exist", "maps are never downloaded"]),
    "empty": (lambda path: path.with_suffix(".pt").touch(), ["is empty (0 bytes)"]),
    "no-ids": (torch_file([]), ["holds no ids", "frspec rank"]),
    "out-of-range": (torch_file([*IDS, 512]), ["entry 128", "512", "vocabulary"]),
    "negative": (torch_file([*IDS, -5]), ["entry 128", "negative", "-5"]),
    "duplicate": (torch_file([*IDS, 7]), ["id 7 is at entries 5 and 128", "remove"]),
    "two-dimensional": (safetensors_file([IDS, IDS]), ["shape [2, 128]", "one flat list"]),
    "floats": (safetensors_file([float(i) for i in IDS]), ["float64", "whole numbers"]),
    "fewer-than-top-k": (torch_file([2, 3]), ["2 ids", "top-k 4", "larger map"]),
    "another-tokenizer": (for_another_tokenizer, ["another tokenizer", "abababababab", "rank"]),
    "not-a-plain-list": (torch_file({"ids": IDS}), ["holds a dict", "plain list"]),
    "hostile-pickle": (hostile_pickle, ["not executed"]),
    "truncated": (truncated, ["not a complete safetensors file", "copy or rank it again"]),
    "unknown-kind": (
        lambda path: np.save(path.with_suffix(".npy"), IDS),
        ["expected a .safetensors or a .pt file"],
    ),
}


@pytest.fixture(scope="session")
def map_files(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("maps")
    files = {}
    for name, (write, _) in WRONG.items():
        write(folder / name)
        files[name] = next(folder.glob(f"{name}.*"), folder / f"{name}.safetensors")
    return files


@pytest.fixture(scope="session")
def refuse(map_files, resolve, server_flags):
    def run(name):
        return resolve([*server_flags, "--speculative-token-map", str(map_files[name])])["error"]

    return run


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_map_is_refused(name, refuse, map_files):
    error = refuse(name)
    assert error["type"] == "TokenMapError"
    assert "\n" not in error["message"]
    for words in WRONG[name][1]:
        assert words in error["message"]
    if name not in ("fewer-than-top-k", "another-tokenizer", "out-of-range"):
        assert map_files[name].name in error["message"]


def test_a_pickle_is_refused_without_executing_it(refuse, map_files):
    assert refuse("hostile-pickle")["type"] == "TokenMapError"
    assert not map_files["hostile-pickle"].with_name("executed").exists()
    # The same file does what it threatens where a reader trusts it.
    pickle.loads(map_files["hostile-pickle"].read_bytes())
    assert map_files["hostile-pickle"].with_name("executed").exists()


def test_the_map_must_be_given(resolve, server_flags):
    error = resolve(server_flags)["error"]
    assert error["type"] == "TokenMapError"
    assert "needs --speculative-token-map" in error["message"]


def test_missing_end_of_turn_is_added_and_said(resolve, server_flags, tmp_path, vocabulary):
    end = vocabulary.tokens["<|im_end|>"]
    ranked = [i for i in range(512) if i != end]
    torch.save(ranked, tmp_path / "map.pt")
    outcome = resolve([*server_flags, "--speculative-token-map", str(tmp_path / "map.pt")])
    assert outcome["error"] is None
    [line] = [line for line in outcome["log"] if "added" in line]
    assert f"{end} '<|im_end|>'" in line


def launch(flags: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "sglang.launch_server", *flags],
        env=cpu_environment(os.environ),
        cwd=ROOT,
        timeout=240,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.slow
def test_the_server_command_ends_with_one_line(map_files, server_flags):
    map_flag = ["--speculative-token-map", str(map_files["duplicate"])]
    done = launch([*server_flags, *map_flag])
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "Load weight" not in done.stderr + done.stdout
    [line] = [line for line in done.stderr.splitlines() if line.startswith("frspec: error: ")]
    assert "id 7 is at entries 5 and 128" in line
    assert done.stderr.splitlines()[-1] == line


@pytest.mark.slow
def test_help_shows_the_flags():
    done = launch(["--help"])
    assert done.returncode == 0
    assert "--frspec-map-size N" in done.stdout
    assert "--speculative-token-map" in done.stdout
