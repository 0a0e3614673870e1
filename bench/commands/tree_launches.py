"""``python -m bench tree-launches``: kernels that a round's tree bookkeeping launches."""

import argparse
import sys
from collections import Counter

import torch
from torch.profiler import ProfilerActivity, profile

from bench.environment import pick_device
from bench.op import Case, Thunk


def main(argv: list[str]) -> int:
    """Print the launches of our path and of the stock path; 2 without a GPU."""
    parser = argparse.ArgumentParser(prog="python -m bench tree-launches", description=__doc__)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--top-k", type=int, default=10)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--nodes", type=int, default=60)
    args = parser.parse_args(argv)
    device = pick_device()
    if device.type != "cuda":
        print("tree-launches counts kernels on a GPU; there is none here", file=sys.stderr)
        return 2
    from bench.ops import _tree_inputs, tree

    case = Case(batch=args.batch, top_k=args.top_k, steps=args.steps, nodes=args.nodes)
    inputs = _tree_inputs.round_inputs(case, device, 0)
    paths = {"ours": tree.ours_round}
    if tree.SGL(case) is None:
        paths["stock (PyTorch and sgl_kernel)"] = tree.sgl_round
    print(f"launches of a round's tree bookkeeping, {case.id}")
    for name, make in paths.items():
        counts = launches(make(inputs))
        print(f"{name}: {counts.total()}")
        for kernel, count in counts.most_common():
            print(f"  {count:3d}  {kernel[:100]}")
    return 0


def launches(thunk: Thunk) -> Counter[str]:
    """How often each kernel (copies and fills too) runs in one call."""
    thunk()  # compiles
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        thunk()
        torch.cuda.synchronize()
    kernels = (event for event in seen.events() or () if event.device_type.name == "CUDA")
    return Counter(event.name for event in kernels)
