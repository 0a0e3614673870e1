"""What the machine's GPU and processes are doing, seen from outside the servers."""

import contextlib
import os
import subprocess
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")
_MIB = 1 << 20


@dataclass(frozen=True)
class GpuState:
    """Memory in bytes, and the share of the last sample period in which kernels ran."""

    total: int
    free: int
    used: int
    busy: float


def gpu_state() -> GpuState | None:
    """Of the first GPU, by ``nvidia-smi``; None where there is none.

    Asked for from outside, since a CUDA context of this process would take memory of its own.
    """
    fields = "memory.total,memory.free,memory.used,utilization.gpu"
    query = ["nvidia-smi", "-i", "0", f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, check=True, timeout=20)
        total, free, used, busy = (int(part) for part in answer.stdout.split(","))
    except (OSError, subprocess.SubprocessError, ValueError):
        return None
    return GpuState(total * _MIB, free * _MIB, used * _MIB, busy / 100)


def gpu_bytes_by_process() -> dict[int, int]:
    """Memory of all GPUs that each process holds; empty where ``nvidia-smi`` cannot tell."""
    query = ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"]
    held: dict[int, int] = {}
    try:
        answer = subprocess.run(query, capture_output=True, text=True, check=True, timeout=20)
        for line in answer.stdout.splitlines():
            pid, used = (int(part) for part in line.split(","))
            held[pid] = held.get(pid, 0) + used * _MIB
    except (OSError, subprocess.SubprocessError, ValueError):
        return {}
    return held


def cpu_seconds(processes: Iterable[int]) -> float:
    """Processor time that the processes have used so far."""
    ticks = 0
    for process in processes:
        with contextlib.suppress(OSError):
            fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
    return ticks / _TICKS


def resident_bytes(processes: Iterable[int]) -> int:
    """Memory of the machine that the processes occupy, shared pages counted once for each."""
    pages = 0
    for process in processes:
        with contextlib.suppress(OSError):
            pages += int(Path(f"/proc/{process}/statm").read_text().split()[1])
    return pages * _PAGE


class CpuShare:
    """Processor time of a set of processes between construction and :meth:`cores`."""

    def __init__(self, processes: Iterable[int]) -> None:
        self._processes = list(processes)
        self._began, self._seconds = time.monotonic(), cpu_seconds(self._processes)

    def cores(self) -> float:
        """Mean number of processor cores in use."""
        passed = time.monotonic() - self._began
        return (cpu_seconds(self._processes) - self._seconds) / passed if passed > 0 else 0.0
