"""The rules by which a result is right. Tests and harness apply the same ones.

The yardstick is PyTorch in the same type: an implementation may be off the fp64 truth by what
PyTorch is off, times 1.5, plus one unit in the last place of the true value. NaN never passes.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

SLACK = 1.5


@dataclass(frozen=True)
class Verdict:
    """Whether a result is right; ``error`` is its largest absolute error, ``why`` the complaint."""

    ok: bool
    error: float = 0.0
    why: str = ""

    def __and__(self, other: "Verdict") -> "Verdict":
        why = "; ".join(filter(None, (self.why, other.why)))
        return Verdict(self.ok and other.ok, max(self.error, other.error), why)


def fail(why: str, error: float = float("nan")) -> Verdict:
    """A red verdict with its reason."""
    return Verdict(False, error, why)


def ulp(truth: Tensor, dtype: torch.dtype) -> Tensor:
    """One unit in the last place of ``dtype`` at each value of ``truth`` (fp64)."""
    info = torch.finfo(dtype)
    magnitude = truth.abs().clamp(min=info.tiny)
    return torch.exp2(torch.floor(torch.log2(magnitude))) * info.eps


def error_bound(same_dtype: Tensor, truth: Tensor) -> Tensor:
    """What an element may be off: 1.5 × PyTorch's worst error in its row, plus one ulp.

    A row is the last dimension; one-dimensional results are one row. PyTorch's error at a single
    element is luck (it can be 0), over a row it is a scale.
    """
    truth = truth.double()
    finite = torch.isfinite(truth)
    off = torch.where(finite, (same_dtype.double() - truth).abs(), 0.0)
    worst = off.amax(dim=-1, keepdim=True) if off.numel() else off
    safe = torch.where(finite, truth, 0.0)
    return SLACK * worst + ulp(safe, same_dtype.dtype)


def _mismatch(out: Tensor, truth: Tensor) -> str:
    if out.shape != truth.shape:
        return f"shape {tuple(out.shape)}, expected {tuple(truth.shape)}"
    if out.isnan().any():
        return f"{int(out.isnan().sum())} of {out.numel()} values are NaN"
    if (out.isinf() != truth.isinf()).any() or (out[truth.isinf()] != truth[truth.isinf()]).any():
        return "infinities differ from the truth's"
    return ""


def no_worse_than_torch(
    out: Tensor, same_dtype: Tensor, truth: Tensor, name: str = "result"
) -> Verdict:
    """``out`` is as close to the fp64 ``truth`` as PyTorch's ``same_dtype`` result is.

    Compares element by element with :func:`error_bound`; infinities must be the truth's own.
    """
    if out.dtype != same_dtype.dtype:
        return fail(f"{name}: dtype {out.dtype}, expected {same_dtype.dtype}")
    truth = truth.double()
    out = out.double()
    if why := _mismatch(out, truth):
        return fail(f"{name}: {why}")
    if not out.numel():
        return Verdict(True)
    off = torch.where(truth.isinf(), 0.0, (out - truth).abs())
    bound = error_bound(same_dtype, truth)
    error, over = off.max().item(), off > bound
    if not over.any():
        return Verdict(True, error)
    at = int((off / bound).argmax())
    where = tuple(int(i) for i in torch.unravel_index(torch.tensor(at), out.shape))
    got, true, limit = (t.flatten()[at].item() for t in (out, truth, bound))
    count = f"{int(over.sum())} of {out.numel()} values out of bound"
    return fail(f"{name}: {count}; at {where} {got:.6g}, truth {true:.6g} ± {limit:.3g}", error)


def equal(out: Tensor, expected: Tensor, name: str = "result") -> Verdict:
    """Integers (ids, masks, links): the same shape and every value equal."""
    if out.shape != expected.shape:
        return fail(f"{name}: shape {tuple(out.shape)}, expected {tuple(expected.shape)}")
    wrong = int((out != expected).sum())
    return Verdict(True) if not wrong else fail(f"{name}: {wrong} of {out.numel()} values differ")


def topk_matches(values: Tensor, ids: Tensor, truth: Tensor, bound: Tensor | float) -> Verdict:
    """``values`` [B, k] and ``ids`` [B, k] are a top-k of the scores ``truth`` [B, V] (fp64).

    ``ids`` are columns of ``truth``; ``bound`` is what a score may be off, broadcast to [B, k].
    Values descend and agree with the true scores of their ids; ids are unique and equal the truth's
    wherever the true score stands apart from both neighbours by more than two scores can be off.
    Which of two closer ones comes first is rounding; that neither falls out of the top-k by more
    than the bound is checked all the same.
    """
    truth = truth.double()
    values, k = values.double(), ids.shape[1]
    if why := _topk_malformed(values, ids, truth.shape[1]):
        return fail(why)
    if not ids.numel():
        return Verdict(True)
    limit = torch.as_tensor(bound, dtype=torch.float64, device=truth.device).expand_as(values)
    gathered = truth.gather(1, ids)
    off = torch.where(gathered == values, 0.0, (gathered - values).abs())
    error = off.max().item()
    if (off > limit).any() or off.isnan().any():
        return fail("values are not the true scores of their ids", error)
    top, top_ids = truth.topk(min(k + 1, truth.shape[1]), dim=1)
    gap = top[:, :-1] - top[:, 1:]
    apart = torch.nn.functional.pad(gap, (1, max(0, k - gap.shape[1])), value=float("inf"))
    decided = torch.minimum(apart[:, :k], apart[:, 1 : k + 1]) > 2 * limit
    if (wrong := decided & (ids != top_ids[:, :k])).any():
        return fail(f"{int(wrong.sum())} ids differ from the truth's where the gap is clear", error)
    if (gathered < top[:, k - 1 : k] - 2 * limit).any():
        return fail("an id does not belong among the top-k", error)
    return Verdict(True, error)


def _topk_malformed(values: Tensor, ids: Tensor, columns: int) -> str:
    if values.shape != ids.shape:
        return f"values {tuple(values.shape)} but ids {tuple(ids.shape)}"
    if values.isnan().any():
        return f"{int(values.isnan().sum())} top-k values are NaN"
    if ((ids < 0) | (ids >= columns)).any():
        return f"ids outside [0, {columns})"
    if (values.diff(dim=1) > 0).any():
        return "values do not descend"
    ordered = ids.sort(dim=1).values
    return "an id occurs twice in a row" if (ordered.diff(dim=1) == 0).any() else ""


def ties_to_smaller_id(values: Tensor, ids: Tensor) -> Verdict:
    """Where neighbouring ``values`` [B, k] are equal, the smaller of their ``ids`` comes first."""
    tied = values.diff(dim=1) == 0
    wrong = int((tied & (ids.diff(dim=1) <= 0)).sum())
    return Verdict(True) if not wrong else fail(f"{wrong} ties put the larger id first")
