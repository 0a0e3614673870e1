"""Moving KV slots in every layer's buffer at once, addressed by raw pointers as SGLang does."""

import ctypes

import numpy as np
from torch import Tensor


def copy_all_layer_kv_cache_cpu(
    data_ptrs: Tensor,  # [buffers] uint64: address of each contiguous [slots, ...] buffer
    strides: Tensor,  # [buffers]: bytes of one slot
    tgt_loc: Tensor,  # [N]
    src_loc: Tensor,  # [N]
) -> None:
    """Copy slot ``src_loc[i]`` to ``tgt_loc[i]`` in each buffer.

    All sources are read before any target is written, so the two lists may overlap.
    """
    if tgt_loc.numel() == 0:
        return
    tgt, src = tgt_loc.numpy(), src_loc.numpy()
    slots = int(max(tgt.max(), src.max())) + 1
    for address, slot_bytes in zip(data_ptrs.tolist(), strides.tolist(), strict=True):
        memory = (ctypes.c_uint8 * (slots * slot_bytes)).from_address(address)
        rows = np.frombuffer(memory, dtype=np.uint8).reshape(slots, slot_bytes)
        rows[tgt] = rows[src]
