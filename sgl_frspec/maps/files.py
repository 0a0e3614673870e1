"""Reading and writing map files. The format is described in ``docs/token-map.md``."""

import contextlib
import dataclasses
import difflib
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from sgl_frspec.maps.token_map import (
    FORMAT_VERSION,
    MapMetadata,
    SourceRecord,
    TokenMap,
    TokenMapError,
    check_ids,
)

# One key only: safetensors writes several keys in arbitrary order, and equal maps must be equal
# bytes.
METADATA_KEY = "token_map"

PathLike = str | os.PathLike[str]


def load_token_map(path: PathLike) -> TokenMap:
    """Read a map from a local ``.safetensors`` file, or a ranked list from a ``freq_*.pt``.

    Nothing is ever downloaded, and no pickle is executed.

    Raises:
        TokenMapError: the file is missing, truncated, of another kind, or breaks a rule of
            :class:`TokenMap`; the message names the file, the entry and the remedy.
    """
    path = existing_file(path)
    if path.suffix in (".pt", ".pth", ".bin"):
        from sgl_frspec.maps.torch_files import load_torch_ids

        ids = load_torch_ids(path)
        check_ids(ids, where=str(path))
        return TokenMap(ids)
    if path.suffix != ".safetensors":
        raise TokenMapError(f"{path}: unknown kind of map; expected a .safetensors or a .pt file")
    return _load_safetensors(path)


def save_token_map(token_map: TokenMap, path: PathLike) -> None:
    """Write ``token_map`` to ``path``: equal maps give equal bytes, and never a half-written file.

    Raises:
        TokenMapError: ``path`` does not end in ``.safetensors``, or the disk refused it.
    """
    path = Path(path)
    if path.suffix != ".safetensors":
        raise TokenMapError(f"{path}: name the map something.safetensors")
    arrays = {"ids": np.ascontiguousarray(token_map.ids)}
    if token_map.counts is not None:
        arrays["counts"] = np.ascontiguousarray(token_map.counts)
    text = json.dumps(dataclasses.asdict(token_map.metadata), sort_keys=True, ensure_ascii=True)
    with atomic_file(path) as file:
        file.write(save(arrays, metadata={METADATA_KEY: text}))


@contextlib.contextmanager
def atomic_file(path: PathLike) -> Iterator[BinaryIO]:
    """A binary file that appears at ``path`` complete, or not at all.

    Raises:
        TokenMapError: the folder is missing or full; what was at ``path`` is left as it was.
    """
    path = Path(path)
    temporary = ""
    try:
        handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        with os.fdopen(handle, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(temporary, 0o666 & ~umask)
        os.replace(temporary, path)
    except OSError as error:
        raise TokenMapError(
            f"cannot write {path}: {error.strerror or error}; nothing was changed. Free some"
            " space or choose another folder"
        ) from error
    finally:
        with contextlib.suppress(OSError):
            os.unlink(temporary)


def existing_file(path: PathLike) -> Path:
    """``path``, when it is a file that has content.

    Raises:
        TokenMapError: it is missing (files of a similar name are suggested), a folder, or empty.
    """
    path = Path(path)
    if path.is_dir():
        raise TokenMapError(f"{path} is a folder; give the map file inside it")
    if not path.exists():
        names = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
        close = difflib.get_close_matches(path.name, names, n=3, cutoff=0.5)
        hint = f"did you mean {', '.join(close)}?" if close else "make one with `frspec rank`"
        raise TokenMapError(f"{path} does not exist ({hint}); maps are never downloaded")
    if path.stat().st_size == 0:
        raise TokenMapError(f"{path} is empty (0 bytes); copy or rank it again")
    return path


def _load_safetensors(path: Path) -> TokenMap:
    data = path.read_bytes()
    try:
        arrays = load(data)
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    except (SafetensorError, ValueError, KeyError) as error:
        raise TokenMapError(
            f"{path}: not a complete safetensors file ({error}); copy or rank it again"
        ) from error
    if "ids" not in arrays:
        raise TokenMapError(
            f"{path}: has no tensor `ids` (found: {', '.join(sorted(arrays)) or 'none'}); this is"
            " not a token map"
        )
    metadata = _parse_metadata(header.get("__metadata__", {}).get(METADATA_KEY), path)
    check_ids(arrays["ids"], vocab_size=metadata.vocab_size, where=str(path))
    return TokenMap(arrays["ids"], arrays.get("counts"), metadata)


def _parse_metadata(text: str | None, path: Path) -> MapMetadata:
    if text is None:
        return MapMetadata()
    try:
        fields: dict[str, Any] = json.loads(text)
        version = fields.get("format_version", FORMAT_VERSION)
        if version > FORMAT_VERSION:
            raise TokenMapError(
                f"{path}: written in format {version}, this version reads up to {FORMAT_VERSION};"
                " upgrade sgl-frspec"
            )
        known = {f.name for f in dataclasses.fields(MapMetadata)}
        kept = {key: value for key, value in fields.items() if key in known}
        kept["sources"] = tuple(SourceRecord(**s) for s in fields.get("sources", ()))
        kept["required_ids"] = tuple(fields.get("required_ids", ()))
        return MapMetadata(**kept)
    except (TypeError, AttributeError, json.JSONDecodeError) as error:
        raise TokenMapError(
            f"{path}: its metadata is damaged ({error}); rank or convert the map again"
        ) from error
