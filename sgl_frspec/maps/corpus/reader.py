"""All documents of one source, file after file, with the hash of what was read."""

import hashlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from sgl_frspec.maps.corpus.documents import (
    USUAL_FIELDS,
    Document,
    read_documents,
    record_document,
)
from sgl_frspec.maps.corpus.sources import COMPRESSIONS, Source, format_of, list_files
from sgl_frspec.maps.corpus.streams import HashedFile, decompressed, looks_binary, open_hashed
from sgl_frspec.maps.token_map import TokenMapError


class SourceReader:
    """Reads one source from its beginning.

    Attributes:
        total_bytes: size of its files as they lie on the disk; 0 when that cannot be known.
        newest_change: when one of them last changed, in ns.
        sha256: known once :meth:`documents` has ended; None for a Hugging Face dataset.
        skipped: files of a folder that hold no text.
    """

    def __init__(self, source: Source) -> None:
        self.source = source
        unsized = source.is_dataset or source.location == "-"
        self._files = [] if unsized else list_files(source)
        self.total_bytes = sum(path.stat().st_size for path in self._files)
        self.newest_change = max((path.stat().st_mtime_ns for path in self._files), default=0)
        self.sha256: str | None = None
        self.skipped: list[Path] = []
        self._done = 0
        self._open: HashedFile | None = None

    @property
    def position(self) -> int:
        """Bytes read so far."""
        return self._done + (self._open.position if self._open else 0)

    def documents(self) -> Iterator[Document]:
        """Every document, in an order that depends on the files' names and content alone.

        Raises:
            TokenMapError: a file is missing, damaged, or not what its format says.
        """
        if self.source.is_dataset:
            yield from _dataset_rows(self.source)
        elif self.source.location == "-":
            file_format = self.source.format or "text"
            yield from self._read(sys.stdin.buffer, file_format, "", "standard input")
        elif len(self._files) == 1 and Path(self.source.location).is_file():
            yield from self._file(self._files[0])
        else:
            yield from self._folder()

    def _folder(self) -> Iterator[Document]:
        root = Path(self.source.location)
        listing = hashlib.sha256()
        for path in self._files:
            if self._is_binary(path):
                self.skipped.append(path)
                self._done += path.stat().st_size
                continue
            yield from self._file(path)
            listing.update(f"{path.relative_to(root).as_posix()}\0{self.sha256}\n".encode())
        self.sha256 = listing.hexdigest()

    def _is_binary(self, path: Path) -> bool:
        text = format_of(path, self.source) != "parquet" and path.suffix not in COMPRESSIONS
        return text and looks_binary(path)

    def _file(self, path: Path) -> Iterator[Document]:
        file_format = format_of(path, self.source)
        if file_format != "parquet":
            yield from self._read(open_hashed(path), file_format, path.suffix, str(path))
            return
        yield from _parquet_rows(path, self.source.field)
        with open_hashed(path) as file:
            self.sha256 = file.finish()
            self._done += file.position

    def _read(
        self, raw: HashedFile | IO[bytes], file_format: str, suffix: str, name: str
    ) -> Iterator[Document]:
        file = raw if isinstance(raw, HashedFile) else HashedFile(raw)
        self._open = file
        with file, decompressed(file, suffix, name) as stream:
            yield from read_documents(stream, file_format, self.source.field, name)
            self.sha256 = file.finish()
        self._done += file.position
        self._open = None


def _parquet_rows(path: Path, field: str | None) -> Iterator[Document]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise TokenMapError(
            "reading .parquet files needs the package pyarrow: pip install 'sgl-frspec[maps]'"
        ) from error
    try:
        # A buffer keeps whole column chunks, which may be gigabytes, out of memory.
        with parquet.ParquetFile(path, buffer_size=1 << 20) as file:
            names = file.schema_arrow.names
            wanted = (field,) if field else USUAL_FIELDS
            columns = next(([name] for name in wanted if name in names), None)
            for batch in file.iter_batches(batch_size=256, columns=columns):
                for row in batch.to_pylist():
                    yield record_document(row, field, str(path))
    except (pyarrow.ArrowException, OSError) as error:
        raise TokenMapError(f"{path}: not a complete parquet file ({error})") from error


def _dataset_rows(source: Source) -> Iterator[Document]:
    try:
        import datasets  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise TokenMapError(
            f"{source.location}: reading Hugging Face datasets needs the package datasets:"
            " pip install 'sgl-frspec[maps]'"
        ) from error
    name, _, rest = source.location.removeprefix("hf:").partition(":")
    config, _, split = rest.partition(":")
    try:
        rows: Any = datasets.load_dataset(
            name, config or None, split=split or "train", streaming=True
        )
        for row in rows:
            yield record_document(row, source.field, source.location)
    except (OSError, RuntimeError, ValueError) as error:
        if isinstance(error, TokenMapError):
            raise
        raise TokenMapError(
            f"{source.location}: cannot be read ({error}); check the name and the network, or pass"
            " a local file"
        ) from error
