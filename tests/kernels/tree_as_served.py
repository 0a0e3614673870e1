"""Every launch of a round of drafting, compiled as a server would; run by test_tree_served.py."""

import sys

import torch

from frspec_kernels import tree, tree_accept
from tests.kernels.compile_as_served import compile_instead_of_launching


def a_round(shape: tree.TreeShape, batch: int) -> None:
    """All steps, the build with each mask, the acceptance of ids and of logits."""
    candidates = tree.empty_candidates(shape, batch, "cpu")
    for step in range(shape.steps):
        rows = batch if step == 0 else batch * shape.top_k
        probs = torch.zeros(rows, shape.top_k)
        hidden = torch.zeros(rows, 64, dtype=torch.bfloat16)
        tree.grow_tree(candidates, shape, step, probs, probs.long())
        tree.grow_tree(candidates, shape, step, probs, probs.long(), hidden=hidden)
    lens = torch.zeros(batch, dtype=torch.int64)
    built = tree.build_tree(candidates, shape, lens, lens)
    mask = torch.zeros(batch * shape.nodes**2, dtype=torch.bool)
    tree.build_tree(candidates, shape, lens.int(), lens, draft_mask=mask)
    tree.build_tree(candidates, shape, lens, lens.int(), full_mask=mask)
    logits = torch.zeros(batch * shape.nodes, 4096)
    for target in (built.tokens, logits, logits[:, :1]):
        for slots in (None, built.retrieve_index.flatten()):
            arguments = built.tokens, built.parents, target, lens, shape.steps + 1
            tree.accept_greedy(*arguments, slots=slots)


def main() -> None:
    """Print how many variants of each kernel the rounds of two sizes of batch compile."""
    compiled = compile_instead_of_launching(tree, tree_accept)
    for batch in (1, 2):
        a_round(tree.TreeShape(top_k=2, steps=4, nodes=6), batch)
    for kernel, hashes in sorted(compiled.items()):
        sys.stdout.write(f"{kernel} {len(hashes)}\n")


if __name__ == "__main__":
    main()
