"""Every path of the draft head and the norms once, at small shapes, for compute-sanitizer:

compute-sanitizer --tool memcheck python -m tests.kernels.head_and_norms_once
compute-sanitizer --tool racecheck python -m tests.kernels.head_and_norms_once

For memcheck set PYTORCH_NO_CUDA_MEMORY_CACHING=1: inside a cached block an access beyond a tensor
is no access beyond an allocation. Results are not looked at; the tests do that.
"""

from functools import partial

import torch
from torch import Tensor

from frspec_kernels import norm
from frspec_kernels.reduced_topk import (
    FinalNorm,
    LaunchConfig,
    merge_shards,
    reduced_vocab_topk,
    reduced_vocab_topk_shard,
)

VOCAB, WIDTH, ROWS = 1500, 256, 5
randn = partial(torch.randn, device="cuda", dtype=torch.bfloat16)
rand = partial(torch.rand, device="cuda")


def _distinct(below: int) -> Tensor:
    return torch.randperm(below, device="cuda")[:VOCAB].contiguous()


def draft_head(k: int) -> None:
    """The pass over the head and the merge, by every kind of head and option."""
    hidden, full = randn(ROWS, WIDTH), randn(2000, WIDTH)
    head, token_map, scale = full[:VOCAB].clone(), _distinct(9000), rand(VOCAB)
    crowded = torch.zeros_like(head)  # the best scores of half of the rows in few slices
    crowded[:40] = head[:40] * 9
    for dense in (head, crowded):
        reduced_vocab_topk(hidden, dense, k, token_map=token_map)
    for narrow in (head.to(torch.float8_e4m3fn), (head * 30).to(torch.int8)):
        reduced_vocab_topk(hidden, narrow, k, head_scale=scale, temperature=rand(ROWS) + 0.5)
    reduced_vocab_topk(hidden, full, k, row_ids=_distinct(2000), log_probs=True)
    final_norm = FinalNorm(rand(WIDTH).bfloat16(), 1e-5, randn(ROWS, WIDTH))
    reduced_vocab_topk(hidden, head, k, norm=final_norm)
    shards = [
        reduced_vocab_topk_shard(hidden, head[part], k, token_map=token_map[part])
        for part in (slice(0, 700), slice(700, VOCAB))
    ]
    merge_shards(torch.stack(shards))


def odd_shapes() -> None:
    """More rows than a tile, sizes that no block divides, and more slices than a warp merges."""
    reduced_vocab_topk(randn(70, 208)[:, :200], randn(333, 200), 10)
    many = LaunchConfig(block_v=16, block_h=64, warps=1, stages=2)
    reduced_vocab_topk(randn(ROWS, WIDTH), randn(17_000, WIDTH), 10, config=many)


def norms(width: int) -> None:
    """The three norms, strided rows among them."""
    x, residual, weight = randn(3, width), randn(3, width + 8)[:, :width], rand(width).bfloat16()
    norm.rms_norm(x, weight, 1e-5)
    norm.rms_norm(x, weight, 1e-5, gemma=True)
    norm.add_rms_norm(x, residual, weight, 1e-5)
    token_ids = torch.tensor([0, 4, 2], device="cuda")
    norm.dual_norm_concat(token_ids, randn(5, width), x, weight, weight, 1e-5)


if __name__ == "__main__":
    torch.manual_seed(0)
    for best in (1, 10, 64):
        draft_head(best)
    odd_shapes()
    for elements in (100, 576, 4096):
        norms(elements)
    torch.cuda.synchronize()
