"""Attention of one request under its plan. No SGLang here."""

from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from sgl_frspec.cpu_engine.plan import RequestPlan


def attend(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    plan: RequestPlan,
    scale: float,
    window: int | None = None,
) -> Tensor:
    """Attention of one request: softmax(scale * q kᵀ + mask) v, ``[n, Hq, Dv]``.

    ``queries`` is ``[tokens, Hq, D]``; ``keys`` and ``values`` are the pool's ``[slots, Hkv, D]``.
    Hq must be a multiple of Hkv; keys in another type are converted to the queries'. A query sees
    the ``window`` positions before its own, or everything with None.
    """
    k, v = keys[plan.slots], values[plan.slots]
    if k.dtype != queries.dtype:
        k, v = k.to(queries.dtype), v.to(queries.dtype)
    out = scaled_dot_product_attention(
        queries[plan.start : plan.stop].transpose(0, 1)[None],
        k.transpose(0, 1)[None],
        v.transpose(0, 1)[None],
        attn_mask=plan.mask if window is None else plan.window_mask(window),
        is_causal=plan.causal and window is None,
        scale=scale,
        enable_gqa=queries.shape[1] != keys.shape[1],
    )
    return out[0].transpose(0, 1)
