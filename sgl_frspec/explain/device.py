"""How fast a GPU streams memory and multiplies matrices."""

from dataclasses import dataclass

# Large streams reach about this share of the data sheet's memory bandwidth, and large bf16
# products about this share of its dense peak. On the H200 both were measured: 4.4 of 4.8 TB/s,
# 0.79 of 0.99 PFLOP/s.
STREAM_SHARE = 0.92
MATMUL_SHARE = 0.80
# A matrix product of few rows streams its weights a little slower than a copy streams both ways,
# takes some time to fill and to drain the GPU, and, where it has so few columns of results that
# their tiles are too few for the GPU, is split along its inner dimension and summed by a second
# kernel. With more rows, part of the multiplications stands beside the stream, not behind it.
# KERNEL_S is what a kernel takes that moves next to nothing. All measured on an H200
# (docs/where-time-goes.md); no other GPU is known to differ.
PRODUCT_SHARE = 0.97  # of what a copy streams
PRODUCT_START_S = 3.5e-6
SPLIT_COLUMNS = 4096  # at most
SPLIT_SUM_S = 2.0e-6
EXPOSED_SHARE = 0.33  # of the multiplications
KERNEL_S = 1.8e-6
# What one thread block streams: PyTorch's softmax gives each row one block, so few rows leave most
# of the GPU idle.
BLOCK_BYTES_PER_S = 68e9


@dataclass(frozen=True)
class Device:
    """Reachable bytes a second and dense bf16 operations a second, and what launches cost the GPU.

    Attributes:
        name: for the eye.
        bytes_per_s, flops_per_s: of large streams and products.
        product_start_s: seconds of a product beyond its bytes and operations.
        kernel_s: seconds of a kernel with next to no bytes.
        block_bytes_per_s: of a kernel that gives a row one thread block.
        split_sum_s: seconds of the kernel that adds up the parts of a split product.
    """

    name: str
    bytes_per_s: float
    flops_per_s: float
    product_start_s: float = PRODUCT_START_S
    kernel_s: float = KERNEL_S
    block_bytes_per_s: float = BLOCK_BYTES_PER_S
    split_sum_s: float = SPLIT_SUM_S

    def seconds(self, nbytes: float, flops: float) -> float:
        """The longer of streaming ``nbytes`` and doing ``flops``."""
        return max(nbytes / self.bytes_per_s, flops / self.flops_per_s)

    def product_seconds(self, nbytes: float, flops: float, columns: int) -> float:
        """Expected time of a matrix product of that many columns, alone on the GPU."""
        stream = nbytes / (PRODUCT_SHARE * self.bytes_per_s)
        multiply = flops / self.flops_per_s
        split = self.split_sum_s if columns <= SPLIT_COLUMNS else 0.0
        return max(stream + EXPOSED_SHARE * multiply, multiply) + self.product_start_s + split


# Data sheets: memory bandwidth in TB/s, dense bf16 tensor peak in PFLOP/s.
_DATA_SHEETS = {
    "a100": (2.04, 0.312),
    "h100": (3.35, 0.989),
    "h200": (4.80, 0.989),
    "b200": (8.00, 2.250),
    "l40s": (0.864, 0.362),
    "rtx4090": (1.008, 0.165),
    "mi300x": (5.30, 1.307),
}


def device_names() -> list[str]:
    """Names that :func:`find_device` knows."""
    return sorted(_DATA_SHEETS)


def find_device(name: str) -> Device:
    """The device called ``name`` (any case).

    Raises:
        ValueError: for an unknown name.
    """
    key = name.lower().replace("-", "").replace("_", "").replace(" ", "")
    if key not in _DATA_SHEETS:
        known = ", ".join(device_names())
        raise ValueError(
            f"unknown GPU {name!r}; known: {known}. For another one give --bandwidth and --flops"
        )
    bandwidth, peak = _DATA_SHEETS[key]
    return Device(key, bandwidth * 1e12 * STREAM_SHARE, peak * 1e15 * MATMUL_SHARE)
