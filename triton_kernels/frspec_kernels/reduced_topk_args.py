"""Arguments, results and scratch of :mod:`frspec_kernels.reduced_topk`, and their checks."""

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from frspec_kernels.devices import check_devices, check_is_tensor
from frspec_kernels.norm_args import check_eps, check_written

MAX_K = 64
NARROW_DTYPES = (torch.float8_e4m3fn, torch.int8)
ID_DTYPES = (torch.int64, torch.int32)
HIDDEN_DTYPES = (torch.bfloat16, torch.float16)


class TopK(NamedTuple):
    """The drafts of each row, best first."""

    probs: Tensor  # [B, K] float32: probabilities, or their logarithms
    token_ids: Tensor  # [B, K] int64
    lse: Tensor  # [B] float32: log-sum-exp over the whole reduced vocabulary


class FinalNorm(NamedTuple):
    """RMSNorm of ``hidden`` in front of the head: ``x / sqrt(mean(x²) + eps) · weight``.

    With ``residual`` [B, H], x is hidden + residual, and residual is overwritten by that sum.
    """

    weight: Tensor  # [H]
    eps: float
    residual: Tensor | None = None


class HeadInputs(NamedTuple):
    """What :func:`~frspec_kernels.reduced_topk.reduced_vocab_topk` reads."""

    hidden: Tensor
    head: Tensor
    token_map: Tensor | None
    head_scale: Tensor | None
    row_ids: Tensor | None
    temperature: Tensor | None
    norm: FinalNorm | None

    @property
    def rows(self) -> int:
        """Rows of hidden, B."""
        return self.hidden.shape[0]

    @property
    def vocab(self) -> int:
        """Ids of the reduced vocabulary, V."""
        return (self.head if self.row_ids is None else self.row_ids).shape[0]

    @property
    def token_ids(self) -> Tensor | None:
        """[V] token id of each draft id; None where they are the same."""
        return self.row_ids if self.token_map is None else self.token_map


class Workspace(NamedTuple):
    """Scratch, from :func:`~frspec_kernels.reduced_topk.allocate_workspace`."""

    scores: Tensor  # float32: the scores of one call; not used if k is 1
    bests: Tensor  # int64: the best score and the softmax state of each slice
    normed: Tensor  # [B, H]: after a call with ``norm``, the normalised rows


def allocate_output(rows: int, k: int, device: torch.device | str) -> TopK:
    """Uninitialised outputs for ``rows`` rows."""
    return TopK(
        torch.empty(rows, k, dtype=torch.float32, device=device),
        torch.empty(rows, k, dtype=torch.int64, device=device),
        torch.empty(rows, dtype=torch.float32, device=device),
    )


def check_is(name: str, value: object, kind: type) -> None:
    """Raise ``TypeError`` unless ``value`` is of the named tuple ``kind``."""
    if not isinstance(value, kind):
        raise TypeError(f"{name} is a {type(value).__name__}; give a {kind.__name__}")


def check_tensor(
    name: str, tensor: Tensor, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...]
) -> None:
    """Shape, type and unit stride in the last dimension."""
    check_is_tensor(name, tensor)
    if tensor.dtype not in dtypes:
        raise TypeError(f"{name} is {tensor.dtype}; use one of {dtypes}")
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name} is {tuple(tensor.shape)}, expected {shape}")
    if tensor.numel() and shape[-1] > 1 and tensor.stride(-1) != 1:
        raise ValueError(f"{name} has stride {tensor.stride(-1)} in its last dimension; make it 1")


def check_inputs(inputs: HeadInputs, k: int) -> None:
    """Raise ``ValueError`` or ``TypeError`` for what the kernels cannot take."""
    hidden, head = inputs.hidden, inputs.head
    check_is_tensor("hidden", hidden)
    check_is_tensor("head", head)
    if hidden.dim() != 2 or head.dim() != 2:
        raise ValueError(f"hidden {tuple(hidden.shape)} and head {tuple(head.shape)} must be 2-D")
    if inputs.row_ids is not None:
        _check_row_ids(inputs.row_ids, head)
    hidden_size, vocab = hidden.shape[1], inputs.vocab
    check_tensor("hidden", hidden, (inputs.rows, hidden_size), HIDDEN_DTYPES)
    check_tensor("head", head, (head.shape[0], hidden_size), (hidden.dtype, *NARROW_DTYPES))
    if not isinstance(k, int):
        raise TypeError(f"k is {k!r}; give a whole number, 1 to {MAX_K}")
    if not 1 <= k <= min(MAX_K, vocab):
        raise ValueError(f"k is {k}; give 1 to {MAX_K}, at most the {vocab} ids of the head")
    if (head.dtype in NARROW_DTYPES) != (inputs.head_scale is not None):
        need = "needs head_scale" if inputs.head_scale is None else "takes no head_scale"
        raise ValueError(f"a {head.dtype} head {need}")
    for name, tensor, shape, dtypes in (
        ("token_map", inputs.token_map, (vocab,), ID_DTYPES),
        ("head_scale", inputs.head_scale, (vocab,), (torch.float32,)),
        ("temperature", inputs.temperature, (inputs.rows,), (torch.float32,)),
    ):
        if tensor is not None:
            check_tensor(name, tensor, shape, dtypes)
    if head.dtype == torch.float8_e4m3fn and not _converts_fp8(head.device):
        raise TypeError(
            f"{head.device} has no conversion from fp8-e4m3; use int8 or {hidden.dtype}"
        )
    if inputs.norm is not None:
        _check_norm(inputs.norm, hidden)
    _check_all_devices(inputs)


def _check_row_ids(row_ids: Tensor, head: Tensor) -> None:
    check_is_tensor("row_ids", row_ids)
    check_tensor("row_ids", row_ids, (row_ids.numel(),), ID_DTYPES)
    if not head.shape[0]:
        raise ValueError("head has no rows for row_ids to pick")


@cache
def _converts_fp8(device: torch.device) -> bool:
    """NVIDIA GPUs do from compute capability 8.9; AMD's have another fp8 type."""
    if device.type != "cuda":
        return True
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 9)


def _check_norm(norm: FinalNorm, hidden: Tensor) -> None:
    check_is("norm", norm, FinalNorm)
    check_eps(norm.eps)
    floats = (*HIDDEN_DTYPES, torch.float32)
    check_tensor("norm.weight", norm.weight, (hidden.shape[1],), floats)
    if norm.residual is not None:
        check_tensor("norm.residual", norm.residual, tuple(hidden.shape), floats)
        check_written("norm.residual", norm.residual)


def _check_all_devices(inputs: HeadInputs) -> None:
    tensors = inputs._asdict()
    norm = tensors.pop("norm")
    if norm is not None:
        tensors |= {"norm.weight": norm.weight, "norm.residual": norm.residual}
    check_devices(inputs.hidden.device, **tensors)


def check_workspace(workspace: Workspace, inputs: HeadInputs) -> None:
    """Types, devices and strides of scratch; its sizes are checked where it is cut up."""
    check_is("workspace", workspace, Workspace)
    used = [
        ("scores", workspace.scores, torch.float32, 1),
        ("bests", workspace.bests, torch.int64, 1),
    ]
    if inputs.norm is not None:
        used.append(("normed", workspace.normed, inputs.hidden.dtype, 2))
    for name, tensor, dtype, dims in used:
        if tensor.dtype != dtype:
            raise TypeError(f"workspace.{name} is {tensor.dtype}; make it {dtype}")
        if tensor.dim() != dims or not tensor.is_contiguous():
            raise ValueError(
                f"workspace.{name} is {tuple(tensor.shape)} with strides {tensor.stride()}; make "
                f"it {dims}-D and contiguous, as allocate_workspace does"
            )
        check_devices(inputs.hidden.device, **{f"workspace.{name}": tensor})


def check_output(out: TopK, rows: int, k: int, device: torch.device) -> None:
    """Raise unless ``out`` holds contiguous results for ``rows`` rows and ``k``."""
    check_is("out", out, TopK)
    check_tensor("out.probs", out.probs, (rows, k), (torch.float32,))
    check_tensor("out.token_ids", out.token_ids, (rows, k), (torch.int64,))
    check_tensor("out.lse", out.lse, (rows,), (torch.float32,))
    if not (out.probs.is_contiguous() and out.token_ids.is_contiguous()):
        raise ValueError("out.probs and out.token_ids must be contiguous")
    check_devices(device, **{f"out.{name}": tensor for name, tensor in out._asdict().items()})
