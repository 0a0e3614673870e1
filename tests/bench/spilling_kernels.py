"""Configurations that the cross-compile command must refuse, and one that it must pass."""

import triton
import triton.language as tl

from frspec_kernels.compile_spec import CompileSpec


@triton.jit
def outer_sum_kernel(x_ptr, out_ptr, N: tl.constexpr, REPEATS: tl.constexpr):
    """Keeps all of x [N] in registers while the loop runs."""
    at = tl.arange(0, N)
    x = tl.load(x_ptr + at)
    for _ in range(REPEATS):
        x = x * tl.sum(x, axis=0)
    tl.store(out_ptr + at, x)


@triton.jit
def matmul_loop_kernel(x_ptr, out_ptr, N: tl.constexpr):
    """Sums products of [N, N] tiles that wait in shared memory."""
    at = tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :]
    total = tl.zeros([N, N], tl.float32)
    for tile in range(64):
        x = tl.load(x_ptr + tile * N * N + at)
        total += tl.dot(x, tl.trans(x))
    tl.store(out_ptr + at, total)


@triton.jit
def undefined_name_kernel(x_ptr):
    """Does not compile."""
    tl.store(x_ptr, nothing_of_this_name)  # noqa: F821 # pyright: ignore[reportUndefinedVariable]


SIGNATURE = {"x_ptr": "*fp32:16", "out_ptr": "*fp32:16"}
FITS = CompileSpec(outer_sum_kernel, SIGNATURE, {"N": 1024, "REPEATS": 50}, num_warps=4)
# 32,768 values on 32 threads: four times the registers that there are.
SPILLS = CompileSpec(outer_sum_kernel, SIGNATURE, {"N": 32768, "REPEATS": 50}, num_warps=1)
# Eight tiles of 128 × 128 × 2 bytes in flight are 256 KiB.
TOO_MUCH_SHARED = CompileSpec(
    matmul_loop_kernel, SIGNATURE | {"x_ptr": "*bf16:16"}, {"N": 128}, num_warps=8, num_stages=9
)
BROKEN = CompileSpec(undefined_name_kernel, {"x_ptr": "*fp32:16"}, {})
