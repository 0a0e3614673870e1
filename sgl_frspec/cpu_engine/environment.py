"""The environment variables that turn a server's processes into a CPU engine."""

import importlib.util
import os
from collections.abc import Mapping
from pathlib import Path

STAND_INS = Path(__file__).parent / "stand_ins"


def cpu_environment(base: Mapping[str, str]) -> dict[str, str]:
    """``base`` with the CPU engine enabled: for the processes of one server, not for a shell.

    Nothing else puts the stand-ins on a path, and nothing is written to the installation. The one
    for torchvision is left out where a torchvision is installed.

    Raises:
        ValueError: a real ``sgl_kernel`` is installed, which the stand-in does not replace.
    """
    kernel = importlib.util.find_spec("sgl_kernel")
    if kernel and not is_stand_in(kernel.origin):
        raise ValueError(
            f"sgl_kernel is installed at {kernel.origin}: this is a GPU environment. Serve on the "
            "GPU, or make an environment for the CPU engine (docs/cpu-engine.md)"
        )
    folders = [STAND_INS / "kernel"]
    vision = importlib.util.find_spec("torchvision")
    if vision is None or is_stand_in(vision.origin):
        folders.append(STAND_INS / "vision")
    own = [str(folder) for folder in folders]
    inherited = base.get("PYTHONPATH", "").split(os.pathsep)
    others = [entry for entry in inherited if entry and entry not in own]
    return {
        **base,
        "SGLANG_USE_CPU_ENGINE": "1",
        "PYTHONPATH": os.pathsep.join([*own, *others]),
        # A GPU that the caller decided not to use must not be used by half of the engine.
        "CUDA_VISIBLE_DEVICES": "",
        # torch.compile would need a C++ compiler, and cost more at start-up than it gains.
        "TORCHDYNAMO_DISABLE": "1",
        # Threads that spin while they wait slow down whatever else runs on a small machine.
        "OMP_WAIT_POLICY": base.get("OMP_WAIT_POLICY", "PASSIVE"),
    }


def is_stand_in(origin: str | None) -> bool:
    """Whether a module's file is one of this package's stand-ins."""
    return origin is not None and Path(origin).resolve().is_relative_to(STAND_INS.resolve())
