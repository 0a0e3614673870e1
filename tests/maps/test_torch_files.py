import pickle
import zipfile
from pathlib import Path

import pytest
import torch

from sgl_frspec.maps import TokenMapError, load_token_map


class Payload:
    """A pickle that would create a file while it is read."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self):
        return (Path.touch, (self.target,))


@pytest.mark.parametrize("content", [[5, 0, 9], torch.tensor([5, 0, 9], dtype=torch.int32)])
def test_plain_list_and_integer_tensor(tmp_path: Path, content: object):
    torch.save(content, tmp_path / "freq_3.pt")
    loaded = load_token_map(tmp_path / "freq_3.pt")
    assert loaded.ids.tolist() == [5, 0, 9]
    assert loaded.counts is None


@pytest.mark.parametrize("legacy", [False, True])
def test_pickle_with_code_is_refused_and_not_executed(tmp_path: Path, legacy: bool):
    target = tmp_path / "executed"
    path = tmp_path / "freq.pt"
    if legacy:
        path.write_bytes(pickle.dumps(Payload(target)))
    else:
        torch.save([1, Payload(target)], path)
    with pytest.raises(TokenMapError, match="more than a plain list of ids and was not executed"):
        load_token_map(path)
    assert not target.exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"ids": [1]}, "holds a dict"),
        ((1, 2), "holds a tuple"),
        ("12", "holds a str"),
        ([1, 2.5], r"entry 1 is 2.5, not a token id"),
        ([1, True], "entry 1 is True"),
        ([[1, 2]], r"entry 0 is \[1, 2\]"),
        ([1, 2**70], "entry 1 is 1180591620717411303424"),
        (torch.tensor([1.0]), "type torch.float32"),
        (torch.tensor([True]), "type torch.bool"),
        (torch.tensor([[1, 2]]), r"shape \[1, 2\]"),
        (torch.tensor(3), r"shape \[\]"),
        ([], "holds no ids"),
        ([3, 3], "id 3 is at entries 0 and 1"),
        ([3, -3], r"entry 1 is negative \(-3\)"),
    ],
)
def test_other_content(tmp_path: Path, content: object, message: str):
    torch.save(content, tmp_path / "freq.pt")
    with pytest.raises(TokenMapError, match=message):
        load_token_map(tmp_path / "freq.pt")


@pytest.mark.parametrize("keep", [10, 200, -20])
def test_truncated(tmp_path: Path, keep: int):
    path = tmp_path / "freq.pt"
    torch.save(list(range(1000)), path)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(TokenMapError, match=r"freq.pt"):
        load_token_map(path)


def test_text_file_with_the_suffix(tmp_path: Path):
    (tmp_path / "freq.pt").write_text("1\n2\n3\n")
    with pytest.raises(TokenMapError, match=r"freq.pt"):
        load_token_map(tmp_path / "freq.pt")


def test_archive_that_unpacks_to_a_huge_size(tmp_path: Path):
    path = tmp_path / "freq.pt"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", bytes(300 * 2**20))
    with pytest.raises(TokenMapError, match="unpacks to 314572800 bytes"):
        load_token_map(path)
