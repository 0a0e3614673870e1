"""Files as streams of bytes and text: hashed, decompressed, decoded, in bounded memory."""

import bz2
import contextlib
import gzip
import hashlib
import io
import lzma
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, BinaryIO, cast

from sgl_frspec.maps.token_map import TokenMapError

BLOCK_BYTES = 1 << 20
# No text has records this long; without a bound one broken file could fill the memory.
MAX_LINE_BYTES = 64 << 20
# Beyond this share of invalid bytes a file is not text in UTF-8 but something else.
MAX_INVALID_SHARE = 0.05


class HashedFile(io.RawIOBase):
    """A binary file that remembers the hash of what has been read and how far that is."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._hash = hashlib.sha256()
        self.position = 0

    def readable(self) -> bool:
        """Always."""
        return True

    def readinto(self, buffer: object) -> int:
        """Read into ``buffer`` and hash what was read."""
        view = memoryview(cast(bytearray, buffer))
        data = self._file.read(len(view))
        view[: len(data)] = data
        self._hash.update(data)
        self.position += len(data)
        return len(data)

    def finish(self) -> str:
        """Read what is left and return the whole file's sha256."""
        while self.read(BLOCK_BYTES):
            pass
        return self._hash.hexdigest()


@contextlib.contextmanager
def decompressed(file: HashedFile, suffix: str, name: str) -> Iterator[BinaryIO]:
    """The content of ``file``, unpacked according to ``suffix``.

    Raises:
        TokenMapError: the archive is damaged or cut short, or a package to read it is missing.
    """
    try:
        stream = _unpacker(io.BufferedReader(file, BLOCK_BYTES), suffix)
        yield cast(BinaryIO, stream)
    except (EOFError, OSError, lzma.LZMAError, zlib.error) as error:
        raise TokenMapError(
            f"{name}: damaged or cut short ({error or type(error).__name__}); copy it again"
        ) from error


def _unpacker(file: io.BufferedReader, suffix: str) -> object:
    if suffix == ".gz":
        return gzip.GzipFile(fileobj=file)
    if suffix == ".xz":
        return lzma.LZMAFile(file)
    if suffix == ".bz2":
        return bz2.BZ2File(file)
    return _zstd(file) if suffix == ".zst" else file


def _zstd(file: io.BufferedReader) -> io.BufferedReader:
    try:
        import zstandard
    except ImportError as error:
        raise TokenMapError(
            "reading .zst files needs the package zstandard: pip install 'sgl-frspec[maps]'"
        ) from error
    return io.BufferedReader(_ZstdStream(file, zstandard.ZstdDecompressor()), BLOCK_BYTES)


class _ZstdStream(io.RawIOBase):
    """zstandard's own reader takes a file that is cut short for one that has ended."""

    def __init__(self, file: io.BufferedReader, decompressor: object) -> None:
        self._file = file
        self._new = decompressor.decompressobj  # pyright: ignore[reportAttributeAccessIssue]
        self._object = None
        self._ready = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: object) -> int:
        view = memoryview(cast(bytearray, buffer))
        while not self._ready:
            packed = self._file.read(1 << 16)
            if not packed:
                if self._object is not None:
                    raise EOFError("the last frame does not end")
                return 0
            self._ready = self._unpack(packed)
        n = min(len(view), len(self._ready))
        view[:n], self._ready = self._ready[:n], self._ready[n:]
        return n

    def _unpack(self, packed: bytes) -> bytes:
        import zstandard

        unpacked = []
        try:
            while packed:
                self._object = self._object or self._new()
                unpacked.append(self._object.decompress(packed))
                packed = self._object.unused_data
                self._object = None if self._object.eof else self._object
        except zstandard.ZstdError as error:
            raise OSError(str(error)) from error
        return b"".join(unpacked)


class Utf8Decoder:
    """Bytes to text; invalid bytes are dropped and counted.

    Attributes:
        total: bytes seen.
        dropped: of which invalid.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.total = 0
        self.dropped = 0

    def decode(self, data: bytes) -> str:
        """Text of ``data``, which must not end inside a character that goes on."""
        if self.total == 0:
            data = self._without_mark(data)
        self.total += len(data)
        try:
            return data.decode()
        except UnicodeDecodeError:
            text = data.decode(errors="ignore")
            self.dropped += len(data) - len(text.encode())
            return text

    def finish(self) -> None:
        """Refuse a file that was mostly not text.

        Raises:
            TokenMapError: more than :data:`MAX_INVALID_SHARE` of it was invalid.
        """
        if self.dropped > MAX_INVALID_SHARE * self.total:
            raise TokenMapError(
                f"{self.name}: {self.dropped} of {self.total} bytes are not UTF-8; convert the"
                " file, or leave it out if it holds no text"
            )

    def _without_mark(self, data: bytes) -> bytes:
        if data.startswith((b"\xff\xfe", b"\xfe\xff")):
            raise TokenMapError(f"{self.name}: is UTF-16; convert it to UTF-8 (iconv -f utf-16)")
        return data.removeprefix(b"\xef\xbb\xbf")


def text_blocks(stream: BinaryIO, decoder: Utf8Decoder) -> Iterator[str]:
    """Text in blocks of about :data:`BLOCK_BYTES`, whatever the length of its lines."""
    carry = b""
    while block := stream.read(BLOCK_BYTES):
        data = carry + block
        end = len(data) - _open_character(data)
        carry = data[end:]
        yield decoder.decode(data[:end])
    if carry:
        yield decoder.decode(carry)
    decoder.finish()


def text_lines(stream: BinaryIO, decoder: Utf8Decoder) -> Iterator[tuple[int, str]]:
    """Numbered lines that are not blank.

    Raises:
        TokenMapError: a line is longer than :data:`MAX_LINE_BYTES`.
    """
    number = 0
    while line := stream.readline(MAX_LINE_BYTES + 1):
        number += 1
        if len(line) > MAX_LINE_BYTES:
            raise TokenMapError(
                f"{decoder.name}: line {number} is longer than {MAX_LINE_BYTES >> 20} MiB; write"
                " one record a line, or pass the file as format=text"
            )
        if text := decoder.decode(line).strip():
            yield number, text
    decoder.finish()


def open_hashed(path: Path) -> HashedFile:
    """Open a file for hashed reading.

    Raises:
        TokenMapError: it cannot be opened.
    """
    try:
        return HashedFile(path.open("rb"))
    except OSError as error:
        raise TokenMapError(f"{path}: cannot be read ({error.strerror})") from error


def looks_binary(path: Path) -> bool:
    """True for a file that is not text, judged by its first bytes."""
    with path.open("rb") as file:
        return b"\0" in file.read(8192)


def _open_character(data: bytes) -> int:
    """How many last bytes begin a UTF-8 character that is not complete."""
    for back in range(1, min(4, len(data) + 1)):
        byte = data[-back]
        if byte >= 0xC0:
            needed = 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            return back if back < needed else 0
        if byte < 0x80:
            return 0
    return 0
