"""The token tree: its links and mask from the draft's choices, and greedy acceptance.

Letters: B requests, N tree nodes with the root (the last accepted token) as node 0, K top-k,
D draft steps, S = D + 1 the longest accepted path. Source of the layout: EAGLE-2 (Li et al. 2024)
and SGLang's ``build_tree_kernel_efficient`` and ``verify_tree_greedy``.
"""

import torch
from torch import Tensor

QLEN_ONLY = 1  # SGLang's TreeMaskMode: an N x N mask a request, without the prefix


def build_tree_kernel_efficient_cpu(
    parent_list: Tensor,  # [B, 1 + K * (D - 1)]: candidate that each group of K was drawn from
    selected_index: Tensor,  # [B, N - 1]: chosen candidates, ascending
    verified_seq_len: Tensor,  # [B]: committed tokens
    tree_mask: Tensor,  # [>= B * N * N] bool, written
    positions: Tensor,  # [B * N], written
    retrieve_index: Tensor,  # [B, N], written: node's row in the flat batch
    retrieve_next_token: Tensor,  # [B, N], written: first child, -1 for none
    retrieve_next_sibling: Tensor,  # [B, N], written: next child of the same parent, -1 for none
    topk: int,
    depth: int,
    draft_token_num: int,
    tree_mask_mode: int,
) -> None:
    """Link the chosen candidates to a tree; node i > 0 is candidate ``selected_index[i - 1]``.

    Candidate c belongs to group c // K; group 0 hangs off the root and group g > 0 off candidate
    ``parent_list[g]``. A node whose parent was not chosen (scores can tie) stays unlinked, so that
    acceptance never reaches it. ``mask[i, j]`` says that j is i or an ancestor of i; a node's
    position is the committed length plus its depth.

    Raises NotImplementedError for another mask layout than ``QLEN_ONLY``, the CPU engine's.
    """
    if int(tree_mask_mode) != QLEN_ONLY:
        raise NotImplementedError(
            f"tree_mask_mode {tree_mask_mode}: the CPU engine builds only QLEN_ONLY ({QLEN_ONLY}) "
            "masks; use --attention-backend frspec_cpu"
        )
    batch, nodes = verified_seq_len.numel(), draft_token_num
    parents = _parents(parent_list, selected_index, topk)
    retrieve_index.copy_(torch.arange(batch * nodes).view(batch, nodes))
    _link(parents, retrieve_next_token, retrieve_next_sibling)
    mask = _ancestors(parents, depth)
    positions.copy_((verified_seq_len.long()[:, None] + mask.sum(-1) - 1).flatten())
    tree_mask.flatten()[: mask.numel()] = mask.flatten().to(tree_mask.dtype)


def verify_tree_greedy_cpu(
    predicts: Tensor,  # [B * N], written at accepted nodes: the target's token after the node
    accept_index: Tensor,  # [B, S], written from the front: flat rows of accepted nodes
    accept_token_num: Tensor,  # [B], written: accepted draft tokens, without the bonus
    candidates: Tensor,  # [B, N]: the tree's tokens
    retrive_index: Tensor,  # [B, N]
    retrive_next_token: Tensor,  # [B, N]
    retrive_next_sibling: Tensor,  # [B, N]
    target_predict: Tensor,  # [B, N]: the target's greedy token after each node
) -> None:
    """Walk each tree from the root along the children that the target would have chosen.

    Python lists, not tensors: a walk visits at most N nodes, and one tensor operation costs more
    than the whole walk.
    """
    target = target_predict.flatten().tolist()
    flat_rows = retrive_index.tolist()
    tokens = candidates.tolist()
    first_child, next_sibling = retrive_next_token.tolist(), retrive_next_sibling.tolist()
    max_path = accept_index.shape[1]
    rows: list[int] = []
    for b, flat_row in enumerate(flat_rows):
        path = [0]
        while len(path) < max_path:
            wanted, child = target[flat_row[path[-1]]], first_child[b][path[-1]]
            while child != -1 and tokens[b][child] != wanted:
                child = next_sibling[b][child]
            if child == -1:
                break
            path.append(child)
        accepted = [flat_row[node] for node in path]
        accept_index[b, : len(path)] = torch.tensor(accepted, dtype=accept_index.dtype)
        accept_token_num[b] = len(path) - 1
        rows += accepted
    index = torch.tensor(rows)
    predicts[index] = target_predict.flatten()[index].to(predicts.dtype)


def _parents(parent_list: Tensor, selected: Tensor, topk: int) -> Tensor:
    """Parent node of each node ``[B, N]``; 0 for the root itself, -1 where it was not chosen."""
    batch = selected.shape[0]
    if selected.shape[1] == 0:
        return selected.new_zeros(batch, 1)
    group = selected // topk
    hangs_off_root = group == 0
    if parent_list.shape[1] == 0:
        parent_candidate = torch.full_like(selected, -1)
    else:
        parent_candidate = parent_list.gather(1, group.clamp(max=parent_list.shape[1] - 1))
    is_parent = selected[:, None, :] == parent_candidate[:, :, None]
    node = torch.where(is_parent.any(-1), is_parent.int().argmax(-1) + 1, -1)
    node = node.masked_fill(hangs_off_root, 0)
    return torch.cat([node.new_zeros(batch, 1), node], dim=1)


def _link(parents: Tensor, first_child: Tensor, next_sibling: Tensor) -> None:
    """Write child lists in ascending node order, -1 terminated."""
    nodes = parents.shape[1]
    node = torch.arange(nodes)
    owners = parents.clone()
    owners[:, 0] = -1  # the root is nobody's child
    none = torch.tensor(nodes)
    is_child = owners[:, None, :] == node[:, None]  # [B, parent, child]
    first = torch.where(is_child, node, none).amin(-1)
    later = (owners[:, :, None] == owners[:, None, :]) & (node[None, :] > node[:, None])
    later &= (owners >= 0)[:, :, None]
    sibling = torch.where(later, node, none).amin(-1)
    first_child.copy_(first.masked_fill(first == nodes, -1))
    next_sibling.copy_(sibling.masked_fill(sibling == nodes, -1))


def _ancestors(parents: Tensor, depth: int) -> Tensor:
    """Bool ``[B, N, N]``: which nodes lie on the way from each node to the root, both included."""
    batch, nodes = parents.shape
    mask = torch.zeros(batch, nodes, nodes, dtype=torch.bool)
    mask[:, :, 0] = True
    current = torch.arange(nodes).repeat(batch, 1)
    for _ in range(depth):
        mask.scatter_(2, current[:, :, None], True)
        current = torch.where(current > 0, parents.gather(1, current), 0).clamp(min=0)
    return mask
