"""Ranked id lists as ``torch.save`` files: FR-Spec's published maps, stock SGLang's input."""

import io
import pickle
import zipfile
from pathlib import Path
from typing import Any

import numpy as np

from sgl_frspec.maps.token_map import Ids, TokenMapError

# A list of 262,144 ids is under 2 MB. The bound keeps a hostile archive from filling the memory.
MAX_UNPACKED_BYTES = 256 * 2**20


def load_torch_ids(path: Path) -> Ids:
    """The ids in a ``.pt`` file that holds a plain list of ints or a 1-D integer tensor.

    torch's restricted unpickler refuses a pickle that would call anything, before it calls it.

    Returns:
        int64 ``[N]``, in the file's order.

    Raises:
        TokenMapError: any other content, or a file that is cut short.
    """
    import torch

    _check_unpacked_size(path)
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise TokenMapError(
            f"{path}: holds more than a plain list of ids and was not executed; export the list"
            " with torch.save(list_of_ints, path) or use the .safetensors format"
        ) from error
    except (RuntimeError, EOFError, OSError, ValueError) as error:
        first_line = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise TokenMapError(
            f"{path}: not a complete torch file ({first_line}); copy or rank it again"
        ) from error
    return _as_ids(content, path)


def torch_file_bytes(ids: Ids) -> bytes:
    """A ``.pt`` file with ``ids`` as a plain list, for stock SGLang and FR-Spec's own code."""
    import torch

    buffer = io.BytesIO()
    torch.save(ids.tolist(), buffer)
    return buffer.getvalue()


def _check_unpacked_size(path: Path) -> None:
    if not zipfile.is_zipfile(path):
        return
    with zipfile.ZipFile(path) as archive:
        size = sum(member.file_size for member in archive.infolist())
    if size > MAX_UNPACKED_BYTES:
        raise TokenMapError(
            f"{path}: unpacks to {size} bytes, far more than a list of ids; give the map's own file"
        )


def _as_ids(content: Any, path: Path) -> Ids:
    import torch

    if isinstance(content, torch.Tensor):
        if content.is_floating_point() or content.is_complex() or content.dtype == torch.bool:
            raise TokenMapError(
                f"{path}: holds a tensor of type {content.dtype}; ids are whole numbers: save"
                " ids.to(torch.int64)"
            )
        return content.to(torch.int64).numpy()
    if not isinstance(content, list):
        raise TokenMapError(
            f"{path}: holds a {type(content).__name__}; expected a plain list of ids or a 1-D"
            " integer tensor"
        )
    for i, value in enumerate(content):
        if type(value) is not int or not -(2**63) <= value < 2**63:
            raise TokenMapError(
                f"{path}: entry {i} is {value!r:.80}, not a token id; a map is one flat list of"
                " whole numbers"
            )
    return np.asarray(content, dtype=np.int64)
