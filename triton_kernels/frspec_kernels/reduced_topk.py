r"""Top-k of ``softmax(hidden @ head.T)`` over a reduced vocabulary, in one pass over the head.

    x[b, v] = hidden[b, :] · head[v, :] (· head_scale[v]) (/ temperature[b])
    lse[b]  = log Σ_v exp x[b, v]
    p[b, j] = exp(x[b, v_j] - lse[b]),   v_1 … v_k the k largest of row b

Letters: ``B`` rows, ``H`` hidden size, ``V`` reduced vocabulary, ``K`` top-k, ``P`` slices of V.
One pass over the head: a program keeps the maximum, the sum (the online softmax of Milakov and
Gimelshein, arXiv:1805.02867), the best id and the float32 scores of its slice of the vocabulary; a
second, tiny launch, begun early where the GPU has programmatic dependent launch, merges the slices.
It finds the k slices with the largest maxima, which hold all of the top-k, and reads the scores of
these alone. The scores cost 4 · B / 2H of the head's bytes, and stay in the L2 cache.

Numerics: bf16 or fp16 products, float32 sums and probabilities. Equal scores are ordered by the
smaller token id, whatever the map and the launch configuration. A row with a NaN or +inf score gets
NaN probabilities and a NaN log-sum-exp; a row of nothing but -inf NaN probabilities and a
log-sum-exp of -inf. The ids are valid and distinct all the same, NaN counting as the largest score.

Graph-safe when ``workspace`` and ``out`` are given: no allocation, no synchronisation.
"""

import torch
from torch import Tensor

from frspec_kernels.devices import check_devices
from frspec_kernels.reduced_topk_args import (
    FinalNorm,
    HeadInputs,
    TopK,
    Workspace,
    allocate_output,
    check_inputs,
    check_output,
    check_tensor,
    check_workspace,
)
from frspec_kernels.reduced_topk_launch import (
    LaunchConfig,
    check_config,
    count_parts,
    launch_config,
    run_shard_merge,
    run_slice_merge,
    run_slices,
)
from frspec_kernels.reduced_topk_specs import compile_specs

__all__ = [
    "FinalNorm",
    "LaunchConfig",
    "TopK",
    "Workspace",
    "allocate_output",
    "allocate_workspace",
    "compile_specs",
    "launch_config",
    "merge_shards",
    "reduced_vocab_topk",
    "reduced_vocab_topk_reference",
    "reduced_vocab_topk_shard",
]


def allocate_workspace(
    rows: int,
    vocab: int,
    hidden_size: int,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    head_dtype: torch.dtype | None = None,
    config: LaunchConfig | None = None,
) -> Workspace:
    """Scratch for any number of rows up to ``rows``, and any k.

    Args:
        rows: most rows of hidden in a call.
        vocab: ids of the reduced vocabulary.
        hidden_size: H.
        dtype, device: of hidden.
        head_dtype: of the head; hidden's when None.
        config: the launch configuration that calls will be given, if any.
    """
    itemsize = (head_dtype or dtype).itemsize
    used = {config or launch_config(n, vocab, itemsize) for n in range(1, max(rows, 1) + 1)}
    parts = max(count_parts(c, vocab) for c in used)
    scores = max(count_parts(c, vocab) * c.block_v for c in used)
    return Workspace(
        torch.empty(rows * scores, dtype=torch.float32, device=device),
        torch.empty(rows * 2 * parts, dtype=torch.int64, device=device),
        torch.empty(rows, hidden_size, dtype=dtype, device=device),
    )


def reduced_vocab_topk_reference(
    hidden: Tensor,
    head: Tensor,
    k: int,
    *,
    token_map: Tensor | None = None,
    head_scale: Tensor | None = None,
    row_ids: Tensor | None = None,
    temperature: Tensor | None = None,
    norm: FinalNorm | None = None,
    log_probs: bool = False,
    workspace: Workspace | None = None,
    out: TopK | None = None,
) -> TopK:
    """:func:`reduced_vocab_topk` in PyTorch, with float32 logits. ``workspace`` is not used."""
    inputs = HeadInputs(hidden, head, token_map, head_scale, row_ids, temperature, norm)
    check_inputs(inputs, k)
    logits = _logits_reference(inputs)
    ids = inputs.token_ids
    ids = torch.arange(inputs.vocab, device=head.device) if ids is None else ids.long()
    by_id = ids.argsort()  # a stable sort then leaves equal logits in the order of their ids
    at = by_id[logits[:, by_id].argsort(dim=1, descending=True, stable=True)[:, :k]]
    maximum = logits.amax(1, keepdim=True)
    shift = torch.where(maximum == float("-inf"), 0.0, maximum)
    lse = maximum + torch.log(torch.exp(logits - shift).sum(1, keepdim=True))
    log_p = logits.gather(1, at) - lse
    result = TopK(log_p if log_probs else log_p.exp(), ids[at], lse[:, 0])
    if out is None:
        return result
    for target, value in zip(out, result, strict=True):
        target.copy_(value)
    return out


def _logits_reference(inputs: HeadInputs) -> Tensor:
    hidden, head = inputs.hidden, inputs.head
    if inputs.norm is not None:
        hidden = _norm_reference(hidden, inputs.norm)
    if inputs.row_ids is not None:
        head = head[inputs.row_ids]
    logits = hidden.float() @ head.to(hidden.dtype).float().T
    if inputs.head_scale is not None:
        logits = logits * inputs.head_scale
    if inputs.temperature is not None:
        logits = logits / inputs.temperature[:, None]
    return logits


def _norm_reference(hidden: Tensor, norm: FinalNorm) -> Tensor:
    x = hidden.float()
    if norm.residual is not None:
        x = x + norm.residual.float()
        norm.residual.copy_(x)
    x = x * torch.rsqrt(x.square().mean(1, keepdim=True) + norm.eps) * norm.weight.float()
    return x.to(hidden.dtype)


def reduced_vocab_topk(
    hidden: Tensor,
    head: Tensor,
    k: int,
    *,
    token_map: Tensor | None = None,
    head_scale: Tensor | None = None,
    row_ids: Tensor | None = None,
    temperature: Tensor | None = None,
    norm: FinalNorm | None = None,
    log_probs: bool = False,
    workspace: Workspace | None = None,
    out: TopK | None = None,
    config: LaunchConfig | None = None,
) -> TopK:
    """The ``k`` most probable ids of each row of ``softmax(hidden @ head.T)``.

    Args:
        hidden: [B, H] bf16 or fp16; rows may be strided. B may be 0.
        head: [V, H] in hidden's type, fp8-e4m3 (NVIDIA, sm_89 and later) or int8; rows may be
            strided. With ``row_ids``, the full head [·, H].
        k: 1 to 64, at most V.
        token_map: [V] distinct token ids of the head's rows, in [0, 2³¹). The values are not
            checked, that would synchronise with the host: ids beyond that range, or twice the same,
            come out in the wrong order. Without it a row's id is its ``row_ids`` entry, or its
            number.
        head_scale: [V] float32, with an fp8 or int8 head: the factor of each row.
        row_ids: [V] rows of ``head`` to use: no copy of the reduced head is needed. A row that
            ``head`` does not have has the score NaN.
        temperature: [B] float32, greater than 0: divides a row's logits. 0 gives NaN; the values
            are not checked.
        norm: RMSNorm to apply to ``hidden`` first.
        log_probs: return the logarithms of the probabilities.
        workspace, out: from :func:`allocate_workspace` and :func:`allocate_output`; needed in a
            CUDA graph.
        config: launch configuration; the table's when None.

    Returns:
        Probabilities in descending order, their token ids, and the log-sum-exp of each row.

    Raises:
        ValueError: a shape, a stride, a device, ``k`` or a scratch size does not fit.
        TypeError: a type is not supported.
    """
    inputs = HeadInputs(hidden, head, token_map, head_scale, row_ids, temperature, norm)
    check_inputs(inputs, k)
    if config is not None:
        check_config(config)
    out = out or allocate_output(inputs.rows, k, hidden.device)
    check_output(out, inputs.rows, k, hidden.device)
    if inputs.rows:
        slices = run_slices(inputs, k, _scratch(inputs, workspace, config), config)
        run_slice_merge(inputs, slices, k, out, None, log_probs=log_probs)
    return out


def reduced_vocab_topk_shard(
    hidden: Tensor,
    head: Tensor,
    k: int,
    *,
    token_map: Tensor | None = None,
    head_scale: Tensor | None = None,
    row_ids: Tensor | None = None,
    temperature: Tensor | None = None,
    norm: FinalNorm | None = None,
    workspace: Workspace | None = None,
    out: Tensor | None = None,
    config: LaunchConfig | None = None,
) -> Tensor:
    """State of one shard of the head, for :func:`merge_shards`: [B, k + 1] int64.

    A row holds the shard's ``k`` best (score, token id) pairs as sortable keys, and its softmax
    state (maximum, sum): see :mod:`frspec_kernels.primitives`. One all-gather moves all of it.
    Arguments as in :func:`reduced_vocab_topk`; ``token_map`` has the token ids of the shard's rows.
    """
    inputs = HeadInputs(hidden, head, token_map, head_scale, row_ids, temperature, norm)
    check_inputs(inputs, k)
    if config is not None:
        check_config(config)
    if out is None:
        out = torch.empty(inputs.rows, k + 1, dtype=torch.int64, device=hidden.device)
    check_tensor("out", out, (inputs.rows, k + 1), (torch.int64,))
    check_devices(hidden.device, out=out)
    if not out.is_contiguous():
        raise ValueError(f"out has strides {out.stride()}; make it contiguous")
    if inputs.rows:
        slices = run_slices(inputs, k, _scratch(inputs, workspace, config), config)
        run_slice_merge(inputs, slices, k, None, out)
    return out


def _scratch(
    inputs: HeadInputs, workspace: Workspace | None, config: LaunchConfig | None
) -> Workspace:
    if workspace is not None:
        check_workspace(workspace, inputs)
        return workspace
    hidden, itemsize = inputs.hidden, inputs.head.element_size()
    config = config or launch_config(inputs.rows, inputs.vocab, itemsize)
    return allocate_workspace(
        inputs.rows, inputs.vocab, hidden.shape[1],
        dtype=hidden.dtype, device=hidden.device, config=config,
    )  # fmt: skip


def merge_shards(states: Tensor, *, log_probs: bool = False, out: TopK | None = None) -> TopK:
    """The top-k over all shards, from their ``states`` [S, B, k + 1] int64.

    Ids and order are those of :func:`reduced_vocab_topk` on the whole head, wherever it was cut.

    Raises:
        ValueError: ``states`` or ``out`` has another shape.
        TypeError: ``states`` or ``out`` has another type.
    """
    if states.dim() != 3 or not states.shape[0] or states.shape[2] < 2:
        raise ValueError(f"states is {tuple(states.shape)}, expected [S, B, k + 1] with S > 0")
    check_tensor("states", states, tuple(states.shape), (torch.int64,))
    if not states.is_contiguous():
        raise ValueError("states must be contiguous")
    rows, k = states.shape[1], states.shape[2] - 1
    out = out or allocate_output(rows, k, states.device)
    check_output(out, rows, k, states.device)
    if rows:
        run_shard_merge(states, out, log_probs=log_probs)
    return out
