"""What a user may name as a source: files, folders, standard input, Hugging Face datasets."""

import dataclasses
import difflib
import re
from pathlib import Path

from sgl_frspec.maps.token_map import TokenMapError

FORMATS = ("text", "jsonl", "parquet", "log", "ids")
COMPRESSIONS = (".gz", ".xz", ".bz2", ".zst")
_FORMAT_OF_SUFFIX = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".parquet": "parquet",
    ".log": "log",
    ".ids": "ids",
}
_OPTION = re.compile(r",(weight|field|format|name)=([^,]+)$")


@dataclasses.dataclass(frozen=True)
class Source:
    """One source of text.

    Attributes:
        location: a path, ``-`` for standard input, or ``hf:NAME[:CONFIG[:SPLIT]]``.
        weight: its share of the ranking relative to the other sources' weights.
        field: the column or key that holds the text, the token ids or the chat messages.
        format: one of :data:`FORMATS`; None to go by each file's suffix.
        label: what to call it in a map's metadata and in tables; None for the file's name.
    """

    location: str
    weight: float | None = None
    field: str | None = None
    format: str | None = None
    label: str | None = None

    @property
    def name(self) -> str:
        """A name for metadata that does not give away the machine's folders."""
        if self.label is not None:
            return self.label
        if self.location == "-":
            return "stdin"
        return self.location if self.is_dataset else Path(self.location).name

    @property
    def is_dataset(self) -> bool:
        """True for a Hugging Face dataset."""
        return self.location.startswith("hf:")


def parse_source(text: str) -> Source:
    """``LOCATION[,weight=W][,field=NAME][,format=FORMAT][,name=LABEL]``.

    Raises:
        TokenMapError: a weight that is no positive number, or an unknown format.
    """
    options: dict[str, str] = {}
    while match := _OPTION.search(text):
        options[match[1]] = match[2]
        text = text[: match.start()]
    weight = None
    if "weight" in options:
        weight = _positive_number(options["weight"])
    source_format = options.get("format")
    if source_format is not None and source_format not in FORMATS:
        raise TokenMapError(f"unknown format {source_format!r}; choose from {', '.join(FORMATS)}")
    return Source(text, weight, options.get("field"), source_format, options.get("name"))


def list_files(source: Source) -> list[Path]:
    """The files of a source, in an order that does not depend on the file system.

    Raises:
        TokenMapError: there is no such file or folder, or the folder holds no files.
    """
    path = Path(source.location)
    if path.is_file():
        return [path]
    if path.is_dir():
        visible = (p for p in path.rglob("*") if p.is_file() and not _hidden(p, path))
        files = sorted(visible, key=lambda p: p.relative_to(path).as_posix())
        if not files:
            raise TokenMapError(f"{path}: the folder holds no files")
        return files
    siblings = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
    close = difflib.get_close_matches(path.name, siblings, n=3, cutoff=0.5)
    hint = f"; did you mean {', '.join(close)}?" if close else ""
    raise TokenMapError(f"{source.location}: no such file or folder{hint}")


def format_of(path: Path, source: Source) -> str:
    """The format of one file of ``source``."""
    if source.format is not None:
        return source.format
    name = path.with_suffix("") if path.suffix in COMPRESSIONS else path
    return _FORMAT_OF_SUFFIX.get(name.suffix, "text")


def _hidden(path: Path, root: Path) -> bool:
    return any(part.startswith(".") for part in path.relative_to(root).parts)


def _positive_number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise TokenMapError(f"weight={text} is not a positive number; write for example weight=0.3")
    return value
