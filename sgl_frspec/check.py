"""``frspec check``: would FRSPEC run here? Versions, GPU, kernels, and the contract with SGLang."""

import argparse
import importlib
import os
import platform
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, entry_points, version
from pathlib import Path
from typing import Any

from sgl_frspec import __version__
from sgl_frspec.contract import NEEDS, SUPPORTED
from sgl_frspec.contract_check import check_contract, installed_tree
from sgl_frspec.cpu_engine import is_enabled
from sgl_frspec.source_tree import SourceTree

_KERNELS = ("norm", "reduced_topk", "tree", "tree_attention", "draft_attention")


@dataclass(frozen=True)
class Finding:
    """One line of the report; ``good`` is None where nothing is judged."""

    subject: str
    text: str
    good: bool | None = None

    def __str__(self) -> str:
        mark = {None: "  ", True: "ok", False: "NO"}[self.good]
        return f"{mark}  {self.subject:<10} {self.text}"


def add_parser(subparsers: Any) -> None:
    """Add ``check``."""
    parser = subparsers.add_parser(
        "check",
        help="versions, GPU, kernels, and the SGLang attributes relied on",
        description="Would FRSPEC run here? Exit status 1 if it would not.",
    )
    parser.add_argument(
        "--source",
        type=Path,
        metavar="FOLDER",
        help="check the SGLang in FOLDER (an unpacked wheel or a checkout's python/) instead",
    )
    parser.add_argument("--list", action="store_true", help="list every attribute relied on")


def run(args: argparse.Namespace) -> int:
    """Print the report; 0 if nothing in it is bad."""
    tree = source_tree(args.source) if args.source else installed_tree()
    findings = [*_environment(), *_sglang(tree, installed=not args.source)]
    lines = [str(finding) for finding in findings]
    if args.list:
        lines += ["", *(f"{need.kind:<9} {need}: {need.use}" for need in NEEDS)]
    sys.stdout.write("\n".join(lines) + "\n")
    return int(any(finding.good is False for finding in findings))


def source_tree(folder: Path) -> SourceTree:
    """The tree in ``folder``.

    Raises:
        ValueError: no package ``sglang`` lies there.
    """
    if not (folder / "sglang" / "srt").is_dir():
        raise ValueError(f"{folder} holds no sglang/srt; give the folder that contains sglang/")
    return SourceTree(folder)


def _environment() -> Iterator[Finding]:
    yield Finding("frspec", f"{__version__}, Python {platform.python_version()}")
    import torch

    yield Finding("torch", torch.__version__)
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(index)
            gigabytes = properties.total_memory / (1 << 30)
            yield Finding(
                "GPU",
                f"{index}: {properties.name}, {gigabytes:.0f} GiB, compute capability"
                f" {properties.major}.{properties.minor}",
                properties.major >= 8,
            )
    else:
        engine = "this process is set up for it" if is_enabled() else "`frspec serve` sets it up"
        yield Finding("GPU", f"none: SGLang runs on the CPU engine ({engine})")
    yield _kernels()


def _kernels() -> Finding:
    broken = []
    for name in _KERNELS:
        try:
            importlib.import_module(f"frspec_kernels.{name}")
        except ImportError as error:
            broken.append(f"{name} ({error})")
    triton = _version("triton")
    if broken:
        return Finding("kernels", f"not importable: {', '.join(broken)}; triton {triton}", False)
    return Finding("kernels", f"{', '.join(_KERNELS)}; triton {triton}", True)


def _sglang(tree: SourceTree | None, *, installed: bool) -> Iterator[Finding]:
    supported = f"supported: {' to '.join(SUPPORTED)}"
    if tree is None:
        yield Finding("sglang", f"not installed ({supported}); see docs/plugin.md", False)
        return
    if installed:
        found = _version("sglang")
        yield Finding("sglang", f"{found} ({supported})", _is_supported(found))
        yield _entry_point()
    else:
        yield Finding("sglang", f"{tree.root} ({supported})")
    # Older releases have no CPU engine of ours; where there is no GPU, the installed one needs it.
    cpu_engine = installed and not _has_gpu()
    drifts = check_contract(tree, cpu_engine=cpu_engine)
    for drift in drifts:
        yield Finding("contract", str(drift), False)
    if not drifts:
        checked = sum(cpu_engine or not need.cpu_only for need in NEEDS)
        yield Finding("contract", f"{checked} attributes as expected", True)


def _entry_point() -> Finding:
    names = [entry.name for entry in entry_points(group="sglang.srt.plugins")]
    if "frspec" not in names:
        return Finding("plugin", "SGLang will not find it: run `pip install sgl-frspec`", False)
    allowed = os.environ.get("SGLANG_PLUGINS", "")
    if allowed and "frspec" not in [name.strip() for name in allowed.split(",")]:
        return Finding("plugin", f"SGLANG_PLUGINS={allowed} leaves it out: add frspec", False)
    return Finding("plugin", "SGLang loads it (entry point frspec)", True)


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def _is_supported(found: str) -> bool:
    oldest, newest = (_numbers(bound) for bound in SUPPORTED)
    return oldest <= _numbers(found) <= newest


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split("+")[0].split(".")[:3] if part.isdigit())


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"
