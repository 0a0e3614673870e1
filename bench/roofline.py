"""Peaks of the device, measured in the same run as what is compared with them."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch

from bench.environment import describe

COPY_BYTES = 4 << 30
MATMUL = 8192
REPEATS = 15


@dataclass(frozen=True)
class Peaks:
    """Bytes a second of a large copy (read + written), operations a second of a bf16 product."""

    bytes_per_s: float
    flops_per_s: float

    def floor_us(self, nbytes: float, flops: float) -> float:
        """Microseconds that no implementation runs much below."""
        return 1e6 * max(nbytes / self.bytes_per_s, flops / self.flops_per_s)


def _median_s(call: Callable[[], object]) -> float:
    for _ in range(3):
        call()
    events = []
    for _ in range(REPEATS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        events.append((begin, end))
    torch.cuda.synchronize()
    return sorted(a.elapsed_time(b) for a, b in events)[REPEATS // 2] * 1e-3


@cache
def measure() -> Peaks:
    """The current device's peaks, on random data (zeros run faster)."""
    return Peaks(2 * COPY_BYTES / _copy_s(), 2 * MATMUL**3 / _matmul_s())


def _copy_s() -> float:
    source = torch.empty(COPY_BYTES // 2, dtype=torch.bfloat16, device="cuda").normal_()
    target = torch.empty_like(source)
    return _median_s(lambda: target.copy_(source))


def _matmul_s() -> float:
    a, b = (torch.randn(MATMUL, MATMUL, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return _median_s(lambda: a @ b)


def describe_with_peaks(device: torch.device) -> dict[str, str]:
    """:func:`bench.environment.describe`, and the measured peaks of a GPU."""
    machine = describe(device)
    if device.type == "cuda":
        peaks = measure()
        machine["copy_gb_s"] = f"{peaks.bytes_per_s / 1e9:.0f}"
        machine["bf16_tflop_s"] = f"{peaks.flops_per_s / 1e12:.0f}"
    return machine
