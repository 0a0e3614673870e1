"""Metadata of a GGUF file, and its tensors as Hugging Face weights."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from gguf import GGUFReader, dequantize
from tqdm import tqdm


class TensorNames(NamedTuple):
    """Hugging Face's names for llama.cpp's.

    Attributes:
        layer: of the modules of a block, ``attn_q`` to ``self_attn.q_proj``.
        top: of the others, in full, ``output_norm`` to ``model.norm``.
    """

    layer: Mapping[str, str]
    top: Mapping[str, str]

    def translate(self, name: str) -> str:
        """Turn ``blk.3.attn_q.weight`` into ``model.layers.3.self_attn.q_proj.weight``.

        Raises:
            ValueError: a tensor that has no name here.
        """
        stem, _, suffix = name.rpartition(".")
        if stem.startswith("blk."):
            _, index, kind = stem.split(".", 2)
            if kind in self.layer:
                return f"model.layers.{index}.{self.layer[kind]}.{suffix}"
        elif stem in self.top:
            return f"{self.top[stem]}.{suffix}"
        raise ValueError(f"unknown tensor {name!r} in the GGUF file")


def metadata(reader: GGUFReader, key: str) -> Any:
    """Return one metadata value.

    Raises:
        ValueError: the file has no such key.
    """
    field = reader.get_field(key)
    if field is None:
        raise ValueError(f"the GGUF file has no metadata key {key!r}; is it another model's?")
    return field.contents()


def read_weights(
    reader: GGUFReader,
    names: TensorNames,
    restore: Callable[[str, np.ndarray], np.ndarray],
    dtype: torch.dtype = torch.bfloat16,
) -> dict[str, torch.Tensor]:
    """Dequantise every tensor of the file.

    Args:
        reader: the open file.
        names: what each tensor is called.
        restore: undoes what llama.cpp did to the values of one kind of tensor (``attn_q``).
        dtype: of the result.

    Returns:
        Hugging Face parameter name to a contiguous tensor.

    Raises:
        ValueError: an unknown tensor.
    """
    weights: dict[str, torch.Tensor] = {}
    for tensor in tqdm(reader.tensors, desc="dequantise", unit="tensor"):
        values = dequantize(tensor.data, tensor.tensor_type)
        values = restore(tensor.name.split(".")[-2], values)
        name = names.translate(tensor.name)
        weights[name] = torch.from_numpy(np.array(values, order="C")).to(dtype)
    return weights
