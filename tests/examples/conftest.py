"""The packaged model as a Hugging Face folder (set-up makes it, and a first run otherwise), and a
tiny Gemma 3 that went through the conversion of the packaged one.
"""

import dataclasses
import hashlib
from pathlib import Path

import pytest

from examples.gemma3_270m import convert as gemma3_convert
from examples.smollm2_135m.convert import CONVERSION, SOURCE
from tests.examples.tiny_gemma3 import tiny_gemma3, write_gguf

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


@pytest.fixture(scope="session")
def gemma3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gemma3")
    gguf, out = folder / "tiny.gguf", folder / "model"
    write_gguf(tiny_gemma3(), gguf)
    digest = hashlib.sha256(gguf.read_bytes()).hexdigest()
    source = dataclasses.replace(gemma3_convert.SOURCE, sha256=digest)
    conversion = dataclasses.replace(gemma3_convert.CONVERSION, file=source)
    assert conversion.run(out, gguf) is True
    assert conversion.run(out, gguf) is False
    return out
