"""Every launch of sampling, compiled as a server would; run by test_sampling_served.py."""

import sys

import torch

from frspec_kernels import sampling, sampling_proposal
from frspec_kernels.sampling import DraftLists, Sampling
from tests.kernels.compile_as_served import compile_instead_of_launching


def verify(batch: int, nodes: int, vocab: int, width: int, *, truncates: bool) -> None:
    """An acceptance with and without lists and slots."""
    ones, ids = torch.ones(batch), torch.zeros(batch, dtype=torch.int64)
    how = Sampling(ones, ids.int(), ones, ones, ids, truncates)
    tokens = torch.zeros(batch, nodes, dtype=torch.int64)
    logits = torch.zeros(batch * nodes, vocab)
    arguments = logits, tokens, tokens.int(), ids, min(nodes, 4), how
    sampling.accept_sampled(*arguments)
    sampling.accept_sampled(*arguments, slots=tokens.flatten(), threshold_acc=0.5)
    lists = DraftLists(
        tokens.to(torch.int8),
        tokens.int(),
        torch.zeros(batch, 1 if nodes == 1 else nodes, width, dtype=torch.int64),
        torch.zeros(batch, 1 if nodes == 1 else nodes, width),
        fixed=1,
    )
    sampling.accept_sampled(*arguments, lists=lists)


def draw(batch: int, beams: int, depth: int) -> None:
    """A step's proposals."""
    probs = torch.zeros(batch * beams, 64)
    one = torch.ones(batch)
    sampling_proposal.draw_children(
        probs, probs.long(), one, one.long(), one.int(), depth, children=4, fixed=3
    )


def main() -> None:
    """Print how many variants of each kernel two sizes of batch compile."""
    compiled = compile_instead_of_launching(sampling, sampling_proposal)
    for batch in (1, 2):
        for truncates in (False, True):
            verify(batch, 6, 4096, 8, truncates=truncates)
        for depth in range(3):
            draw(batch, 4, depth)
    verify(600, 6, 4096, 8, truncates=True)  # more logits than are worked on at once
    verify(1, 1, 4096, 8, truncates=True)  # first tokens
    for kernel, hashes in sorted(compiled.items()):
        sys.stdout.write(f"{kernel} {len(hashes)}\n")


if __name__ == "__main__":
    main()
