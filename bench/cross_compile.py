"""Compile kernels for GPUs that are not here, and read what the compiler made of them.

``triton.compile`` needs no GPU. Registers and spills come from Triton's own ``cuobjdump`` (NVIDIA)
or from the assembly's metadata (AMD). Triton must have been imported without its interpreter.
"""

import re
import subprocess
import tempfile
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from bench.shipped_kernels import Key, specs_of
from frspec_kernels.compile_spec import CompileSpec

PDL_FROM = 90  # compute capability from which kernels are launched with USE_PDL=True


@dataclass(frozen=True)
class Target:
    """A GPU to compile for."""

    backend: str
    arch: int | str
    warp_size: int
    shared_limit: int  # bytes of shared memory that one program may use

    @property
    def gpu(self) -> GPUTarget:
        """Triton's own description."""
        return GPUTarget(self.backend, self.arch, self.warp_size)


TARGETS = {
    "sm_80": Target("cuda", 80, 32, 163 << 10),
    "sm_90": Target("cuda", 90, 32, 227 << 10),
    "sm_100": Target("cuda", 100, 32, 227 << 10),
    "gfx942": Target("hip", "gfx942", 64, 64 << 10),
}


@dataclass(frozen=True)
class Outcome:
    """One configuration on one target.

    ``spill_bytes`` is what a thread keeps in local memory. ``error`` is why there is no binary;
    ``unsupported`` why there should be none (a type that the target lacks).
    """

    kernel: str
    config: str
    target: str
    registers: int = 0
    spill_bytes: int = 0
    shared_bytes: int = 0
    error: str = ""
    unsupported: str = ""

    @property
    def excess_shared(self) -> int:
        """Bytes of shared memory above the target's limit: it could not be launched."""
        return max(0, self.shared_bytes - TARGETS[self.target].shared_limit)


@lru_cache(maxsize=8)
def _specs_of_module(module_name: str) -> dict[Key, tuple[str, CompileSpec]]:
    return specs_of([module_name])


def compile_named(module_name: str, key: Key, target_name: str) -> Outcome:
    """:func:`compile_for` on a spec named by its module and key: what a worker process can take."""
    return compile_for(_specs_of_module(module_name)[key][1], key, target_name)


def compile_for(spec: CompileSpec, key: Key, target_name: str) -> Outcome:
    """Compile ``spec`` for one of :data:`TARGETS`; a failure is an outcome, not an exception."""
    target = TARGETS[target_name]
    outcome = Outcome(*key, target_name)
    backend = triton.compiler.make_backend(target.gpu)
    options = backend.parse_options({"num_warps": spec.num_warps, "num_stages": spec.num_stages})
    used = {kind.removeprefix("*").removesuffix(":16") for kind in spec.signature.values()}
    if missing := {t for t in used if t.startswith("fp8")} - {
        *vars(options)["supported_fp8_dtypes"]
    }:
        return replace(outcome, unsupported=f"no {', '.join(sorted(missing))}")
    try:
        compiled = triton.compile(_source(spec, target), target=target.gpu, options=vars(options))
        return _with_resources(outcome, compiled, target)
    except Exception as error:  # the compiler's passes raise whatever they like
        return replace(outcome, error=f"{type(error).__name__}: {error}".strip())


def _source(spec: CompileSpec, target: Target) -> ASTSource:
    """The spec as Triton takes it, with the PDL switch as the target would be served."""
    kernel: JITFunction[Any] = spec.kernel
    constexprs = dict(spec.constexprs)
    if target.backend == "cuda" and "USE_PDL" in constexprs:
        constexprs["USE_PDL"] = int(target.arch) >= PDL_FROM
    known = {**spec.signature, **dict.fromkeys(constexprs, "constexpr")}
    if {*known} != {*kernel.arg_names}:
        odd = sorted({*known} ^ {*kernel.arg_names})
        raise ValueError(f"the spec and the kernel's arguments differ in {odd}")
    aligned = [i for i, name in enumerate(kernel.arg_names) if known[name].endswith(":16")]
    return ASTSource(
        fn=kernel,
        signature={name: known[name].removesuffix(":16") for name in kernel.arg_names},
        constexprs=constexprs,
        attrs={(i,): [["tt.divisibility", 16]] for i in aligned},
    )


def _with_resources(outcome: Outcome, compiled: Any, target: Target) -> Outcome:
    read = _amd_resources if target.backend == "hip" else _nvidia_resources
    registers, spill_bytes = read(compiled.asm)
    shared = compiled.metadata.shared
    return replace(outcome, registers=registers, spill_bytes=spill_bytes, shared_bytes=shared)


def _nvidia_resources(asm: dict[str, Any]) -> tuple[int, int]:
    """Registers a thread, bytes of its stack: Triton's kernels use one only to spill."""
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernel.cubin"
        cubin.write_bytes(asm["cubin"])
        tool = knobs.nvidia.cuobjdump.path
        command = [tool, "--dump-resource-usage", str(cubin)]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    used = {name: int(value) for name, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", text)}
    return used["REG"], used["STACK"] + used["LOCAL"]


def _amd_resources(asm: dict[str, Any]) -> tuple[int, int]:
    """VGPRs a thread, bytes of its scratch memory."""
    text = asm["amdgcn"]
    found = re.search(r"\.vgpr_count:\s*(\d+)", text)
    scratch = re.search(r"\.private_segment_fixed_size:\s*(\d+)", text)
    if found is None or scratch is None:
        raise ValueError("the assembly has no .vgpr_count or .private_segment_fixed_size")
    return int(found[1]), int(scratch[1])
