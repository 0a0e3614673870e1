import errno
import os
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from sgl_frspec.maps import (
    MapMetadata,
    SourceRecord,
    TokenMap,
    TokenMapError,
    load_token_map,
    save_token_map,
)
from sgl_frspec.maps.files import atomic_file


@pytest.fixture
def token_map() -> TokenMap:
    metadata = MapMetadata(
        vocab_size=100,
        tokenizer_fingerprint="ab" * 32,
        required_ids=(7,),
        total_count=44,
        corpus="a corpus, 日本",
        sources=(SourceRecord("a.txt", "cd" * 32, 0.5, 3, 44),),
        date="2026-01-02",
    )
    return TokenMap(np.array([7, 50, 2]), np.array([0, 40, 4]), metadata)


def test_round_trip(token_map: TokenMap, tmp_path: Path):
    save_token_map(token_map, tmp_path / "m.safetensors")
    loaded = load_token_map(tmp_path / "m.safetensors")
    assert loaded.ids.tolist() == [7, 50, 2]
    assert loaded.counts is not None
    assert loaded.counts.tolist() == [0, 40, 4]
    assert loaded.metadata == token_map.metadata


def test_equal_maps_are_equal_bytes(token_map: TokenMap, tmp_path: Path):
    for name in "ab":
        save_token_map(token_map, tmp_path / f"{name}.safetensors")
    assert (tmp_path / "a.safetensors").read_bytes() == (tmp_path / "b.safetensors").read_bytes()


def test_counts_and_metadata_are_optional(tmp_path: Path):
    save_file({"ids": np.array([3, 1])}, tmp_path / "m.safetensors")
    loaded = load_token_map(tmp_path / "m.safetensors")
    assert loaded.ids.tolist() == [3, 1]
    assert loaded.counts is None
    assert loaded.metadata == MapMetadata()


def test_missing_file_suggests_close_names(token_map: TokenMap, tmp_path: Path):
    save_token_map(token_map, tmp_path / "llama3_32k.safetensors")
    with pytest.raises(TokenMapError, match=r"did you mean llama3_32k.safetensors\?"):
        load_token_map(tmp_path / "llama3-32k.safetensors")


def test_name_of_a_remote_repository_is_a_missing_file():
    with pytest.raises(TokenMapError, match=r"does not exist .* maps are never downloaded"):
        load_token_map("thunlp/LLaMA3-Instruct-8B-FR-Spec/freq_32768.pt")


def test_empty_file(tmp_path: Path):
    (tmp_path / "m.safetensors").touch()
    with pytest.raises(TokenMapError, match=r"is empty \(0 bytes\)"):
        load_token_map(tmp_path / "m.safetensors")


def test_folder(tmp_path: Path):
    with pytest.raises(TokenMapError, match="is a folder; give the map file inside it"):
        load_token_map(tmp_path)


@pytest.mark.parametrize("keep", [4, 40, 300, -1])
def test_truncated_file(token_map: TokenMap, tmp_path: Path, keep: int):
    path = tmp_path / "m.safetensors"
    save_token_map(token_map, path)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(TokenMapError, match="not a complete safetensors file"):
        load_token_map(path)


def test_huge_header_length_is_refused(tmp_path: Path):
    path = tmp_path / "m.safetensors"
    path.write_bytes((2**60).to_bytes(8, "little") + b"{}")
    with pytest.raises(TokenMapError, match="not a complete safetensors file"):
        load_token_map(path)


def test_file_without_ids(tmp_path: Path):
    save_file({"weight": np.zeros(3, dtype=np.float32)}, tmp_path / "m.safetensors")
    with pytest.raises(TokenMapError, match=r"no tensor `ids` \(found: weight\)"):
        load_token_map(tmp_path / "m.safetensors")


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (np.array([1.0, 2.0]), "type float64"),
        (np.array([[1, 2]]), r"shape \[1, 2\]"),
        (np.array([], dtype=np.int64), "holds no ids"),
        (np.array([1, -2]), "entry 1 is negative"),
        (np.array([1, 1]), "id 1 is at entries 0 and 1"),
    ],
)
def test_bad_ids_name_the_file(tmp_path: Path, ids: np.ndarray, message: str):
    save_file({"ids": ids}, tmp_path / "m.safetensors")
    with pytest.raises(TokenMapError, match=f"m.safetensors: .*{message}"):
        load_token_map(tmp_path / "m.safetensors")


def test_damaged_metadata(tmp_path: Path):
    save_file({"ids": np.array([1])}, tmp_path / "m.safetensors", metadata={"token_map": "{"})
    with pytest.raises(TokenMapError, match="metadata is damaged"):
        load_token_map(tmp_path / "m.safetensors")


def test_later_format_asks_for_an_upgrade(tmp_path: Path):
    metadata = {"token_map": '{"format_version": 99}'}
    save_file({"ids": np.array([1])}, tmp_path / "m.safetensors", metadata=metadata)
    with pytest.raises(TokenMapError, match=r"format 99.*upgrade"):
        load_token_map(tmp_path / "m.safetensors")


def test_unknown_suffix(tmp_path: Path):
    (tmp_path / "m.json").write_text("[1]")
    with pytest.raises(TokenMapError, match="unknown kind of map"):
        load_token_map(tmp_path / "m.json")


def test_full_disk_leaves_the_old_file_and_nothing_else(
    token_map: TokenMap, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    path = tmp_path / "m.safetensors"
    path.write_bytes(b"old")

    def no_space(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", no_space)
    with pytest.raises(TokenMapError, match="No space left on device; nothing was changed"):
        save_token_map(token_map, path)
    assert [p.name for p in tmp_path.iterdir()] == ["m.safetensors"]
    assert path.read_bytes() == b"old"


def test_missing_folder(token_map: TokenMap, tmp_path: Path):
    with pytest.raises(TokenMapError, match="cannot write"):
        save_token_map(token_map, tmp_path / "none" / "m.safetensors")


def test_interrupted_write_leaves_nothing(tmp_path: Path):
    def write_half() -> None:
        with atomic_file(tmp_path / "x") as file:
            file.write(b"half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_half()
    assert list(tmp_path.iterdir()) == []
