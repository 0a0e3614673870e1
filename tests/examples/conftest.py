"""The packaged model as a Hugging Face folder; set-up makes it, and a first run otherwise."""

from pathlib import Path

import pytest

from examples.smollm2_135m.convert import CONVERSION, SOURCE

CACHE = Path(__file__).parents[2] / ".cache"


@pytest.fixture(scope="session")
def smollm2() -> Path:
    folder = CACHE / "smollm2-135m"
    CONVERSION.run(folder)
    return folder


@pytest.fixture(scope="session")
def smollm2_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = SOURCE.extract(SOURCE.download(CACHE), tmp_path_factory.mktemp("gguf"))
    SOURCE.verify(path)
    return path
