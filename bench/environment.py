"""The device that a run uses, and what a result file says about the machine that made it."""

import datetime
import hashlib
import os
import subprocess
from pathlib import Path

import torch

KERNELS = Path(__file__).parents[1] / "triton_kernels" / "frspec_kernels"


def pick_device() -> torch.device:
    """CUDA if there is any, else the CPU with Triton's interpreter.

    Call before anything imports triton: it reads the variable when it is imported.
    """
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    os.environ["TRITON_INTERPRET"] = "1"
    return torch.device("cpu")


def _output(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def sources_digest(folder: Path = KERNELS) -> str:
    """The first digits of a hash over the names and bytes of a folder's modules.

    A measured tree need not be a committed one; this tells which it was: equal digits, same code.
    """
    digest = hashlib.sha256()
    for path in sorted(folder.glob("*.py")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:10]


def describe(device: torch.device) -> dict[str, str]:
    """The columns of every row that say where it was measured."""
    import triton

    on_gpu = device.type == "cuda"
    query = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return {
        "gpu": torch.cuda.get_device_name(device) if on_gpu else "none (Triton's interpreter)",
        "driver": _output(*query).splitlines()[0] if on_gpu else "none",
        "torch": torch.__version__,
        "triton": triton.__version__,
        "git_sha": _output("git", "describe", "--always", "--dirty"),
        "kernels": sources_digest(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }
