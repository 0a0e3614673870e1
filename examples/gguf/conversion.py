"""A converted model's folder: it appears under its name only when complete."""

import argparse
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from examples.gguf.source import PackagedFile

RECORD = "conversion.json"


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write ``value``, indented."""
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


@dataclass(frozen=True)
class Conversion:
    """How one packaged model becomes a folder.

    Attributes:
        file: the GGUF file.
        format_version: raised when the written files change, so that an older folder is converted
            again.
        write_folder: converts the GGUF file into an existing, empty folder.
    """

    file: PackagedFile
    format_version: int
    write_folder: Callable[[Path, Path], None]

    @property
    def record(self) -> dict[str, Any]:
        """What a finished folder says of its making."""
        return {"gguf_sha256": self.file.sha256, "format_version": self.format_version}

    def is_done(self, folder: Path) -> bool:
        """Tell whether ``folder`` is a complete conversion by this version."""
        path = folder / RECORD
        return path.is_file() and json.loads(path.read_text(encoding="utf-8")) == self.record

    def run(self, out: Path, gguf: Path | None = None, wheels: list[Path] | None = None) -> bool:
        """Make the model folder ``out``; download the packages unless files are given.

        Returns:
            False when the folder was already there.

        Raises:
            ValueError: a wrong source file, or ``out`` is some other folder.
            RuntimeError: the download failed.
        """
        if self.is_done(out):
            return False
        if out.exists() and not (out / RECORD).is_file():
            raise ValueError(f"{out} exists and is not a converted model; choose another --out")
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}-") as scratch:
            work = Path(scratch)
            if gguf is None:
                gguf = self.file.extract(wheels or self.file.download(out.parent), work)
            self.file.verify(gguf)
            folder = work / "model"
            folder.mkdir()
            self.write_folder(gguf, folder)
            write_json(folder / RECORD, self.record)
            (folder / "model.safetensors").chmod(0o644)  # safetensors makes it private
            shutil.rmtree(out, ignore_errors=True)
            os.replace(folder, out)
        return True

    def main(self, description: str | None) -> int:
        """Run the command line."""
        parser = argparse.ArgumentParser(
            description=description, formatter_class=argparse.RawTextHelpFormatter
        )
        parser.add_argument("--out", type=Path, required=True, help="folder to make")
        source = parser.add_mutually_exclusive_group()
        source.add_argument("--gguf", type=Path, help="use this GGUF file instead of downloading")
        source.add_argument(
            "--wheel",
            type=Path,
            nargs="+",
            metavar="FILE",
            help="use these wheels instead of downloading: "
            + ", ".join(p.wheel_pattern for p in self.file.packages),
        )
        arguments = parser.parse_args()
        try:
            made = self.run(arguments.out, arguments.gguf, arguments.wheel)
        except (ValueError, RuntimeError) as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
        print(f"{arguments.out}: {'converted' if made else 'already converted'}")
        return 0
