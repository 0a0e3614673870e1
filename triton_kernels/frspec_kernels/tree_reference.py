"""The draft tree in PyTorch: what the kernels of :mod:`frspec_kernels.tree` must equal."""

import torch
from torch import Tensor

from .tree_args import Accepted, Beams, BuiltTree, Candidates, TreeShape


def grow_tree_reference(
    candidates: Candidates,
    shape: TreeShape,
    step: int,
    probs: Tensor,
    token_ids: Tensor,
    hidden: Tensor | None = None,
) -> Beams | None:
    """:func:`frspec_kernels.tree.grow_tree`; fills ``candidates`` too."""
    batch, k = candidates.scores.shape[0], shape.top_k
    probs = torch.where(probs > 0, probs.clamp(max=1.0), 0.0)
    if step == 0:
        first, scores, tokens = 0, probs, token_ids
        candidates.parents[:, 0] = -1
    else:
        first = k + (step - 1) * k * k
        beams = candidates.parents[:, 1 + (step - 1) * k :][:, :k]
        parent_scores = candidates.scores.gather(1, beams)
        scores = (parent_scores[:, :, None] * probs.view(batch, k, k)).flatten(1)
        tokens = token_ids.reshape(batch, k * k)
    candidates.scores[:, first : first + scores.shape[1]] = scores
    candidates.tokens[:, first : first + scores.shape[1]] = tokens
    if step == shape.steps - 1:
        return None
    ranked = torch.arange(k, device=probs.device).expand(batch, k)
    if step > 0:
        by_token = tokens.argsort(dim=1, stable=True)
        by_score = scores.gather(1, by_token).argsort(dim=1, descending=True, stable=True)
        ranked = by_token.gather(1, by_score)[:, :k]
    candidates.parents[:, 1 + step * k :][:, :k] = first + ranked
    requests = torch.arange(batch, device=probs.device)[:, None]
    rows = requests + ranked * 0 if step == 0 else requests * k + ranked // k
    rows = rows.flatten()
    copied = None if hidden is None else hidden[rows]
    return Beams(tokens.gather(1, ranked).flatten(), rows, copied)


def candidate_steps(shape: TreeShape, device: torch.device) -> Tensor:
    """``[C]`` the step that proposed each candidate."""
    beyond = torch.arange(shape.candidates, device=device) - shape.top_k
    return torch.where(beyond < 0, 0, beyond.div(shape.top_k**2, rounding_mode="floor") + 1)


def build_tree_reference(
    candidates: Candidates,
    shape: TreeShape,
    root_tokens: Tensor,
    seq_lens: Tensor,
    ties_by_place: bool = False,
) -> BuiltTree:
    """:func:`frspec_kernels.tree.build_tree`."""
    scores, tokens, parents = candidates
    batch, n, device = scores.shape[0], shape.nodes, scores.device
    steps = candidate_steps(shape, device).expand(batch, -1)
    order = (tokens * (not ties_by_place)).argsort(dim=1, stable=True)
    order = order.gather(1, steps.gather(1, order).argsort(dim=1, stable=True))
    by_score = scores.gather(1, order).argsort(dim=1, descending=True, stable=True)
    selected = order.gather(1, by_score)[:, : n - 1].sort(dim=1).values

    node_of = torch.full((batch, shape.candidates), -1, device=device)
    node_of.scatter_(1, selected, torch.arange(1, n, device=device).expand(batch, -1))
    parent_candidate = parents.gather(1, selected // shape.top_k)
    drafted = node_of.gather(1, parent_candidate.clamp(min=0))
    root = torch.full((batch, 1), -1, device=device)
    parent = torch.cat([root, drafted.where(parent_candidate >= 0, 0)], dim=1)
    depth = torch.cat([root + 1, steps.gather(1, selected) + 1], dim=1)
    node = torch.arange(n, device=device)
    sees = torch.eye(n, dtype=torch.bool, device=device).repeat(batch, 1, 1)
    ancestor = node.expand(batch, -1)
    for _ in range(shape.steps):
        ancestor = parent.gather(1, ancestor).clamp(min=0)
        sees.scatter_(2, ancestor[:, :, None], True)
    child_of = parent[:, :, None] == node  # [B, child, parent]
    same = (parent[:, :, None] == parent[:, None, :]) & (node > node[:, None])
    return BuiltTree(
        tokens=torch.cat([root_tokens[:, None].long(), tokens.gather(1, selected)], dim=1),
        selected=selected,
        parents=parent.int(),
        depths=depth.int().flatten(),
        positions=(seq_lens[:, None] + depth).long().flatten(),
        mask=pack_mask(sees).view(batch * n, -1),
        retrieve_index=torch.arange(batch * n, device=device).view(batch, n),
        next_token=_first(child_of.transpose(1, 2)),
        next_sibling=_first(same),
    )


def _first(flags: Tensor) -> Tensor:
    """Index of the first True in the last dimension, or -1."""
    return torch.where(flags.any(-1), flags.int().argmax(-1), -1)


def pack_mask(sees: Tensor) -> Tensor:
    """``[…, N]`` bool to ``[…, W]`` int32: bit ``j % 32`` of word ``j // 32``."""
    padded = torch.nn.functional.pad(sees.long(), (0, -sees.shape[-1] % 32))
    weights = 1 << torch.arange(32, device=sees.device)
    words = (padded.unflatten(-1, (-1, 32)) * weights).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).int()


def accept_greedy_reference(
    tokens: Tensor,
    parents: Tensor,
    target: Tensor,
    seq_lens: Tensor,
    max_path: int,
    slots: Tensor | None = None,
) -> Accepted:
    """:func:`frspec_kernels.tree.accept_greedy` with the target's tokens ``[B, N]`` given."""
    batch, nodes = tokens.shape
    parent = parents.clamp(min=0).long()
    agrees = tokens == target.gather(1, parent)
    agrees[:, 0] = True
    depth = torch.zeros_like(tokens)
    accepted = depth.bool()
    accepted[:, 0] = True  # step i reaches depth i: none from depth max_path on is accepted
    for _ in range(max_path - 1):
        accepted = agrees & accepted.gather(1, parent)
        depth = (depth.gather(1, parent) + 1).where(parents >= 0, 0)
    lens = accepted.sum(1)
    node = torch.arange(nodes, device=tokens.device).expand(batch, -1)
    path = torch.full((batch, max_path + 1), -1, device=tokens.device)  # one more for the others
    path.scatter_(1, depth.where(accepted, max_path), node)
    path = path[:, :max_path].where(torch.arange(max_path, device=lens.device) < lens[:, None], -1)
    base = torch.arange(batch, device=tokens.device)[:, None] * nodes
    said = target.gather(1, path.clamp(min=0)).where(path >= 0, 0)
    source_slots = target_slots = None
    if slots is not None:
        front = torch.arange(max_path, device=tokens.device).clamp(max=nodes - 1)
        source_slots = slots.long()[base + path.where(path >= 0, front)]
        target_slots = slots.long()[base + front]
    return Accepted(
        accept_index=(base + path).where(path >= 0, -1).int(),
        accept_lens=lens.int(),
        predicts=target.where(accepted, 0).int().flatten(),
        path_tokens=said,
        bonus_tokens=said.gather(1, lens[:, None] - 1)[:, 0],
        new_seq_lens=(seq_lens + lens).long(),
        source_slots=source_slots,
        target_slots=target_slots,
    )
