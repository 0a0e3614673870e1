"""The servers of one comparison: started together or one after the other, then all kept running."""

import importlib.metadata
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import sgl_frspec
from bench.serving import client
from bench.serving.machine import CpuShare, gpu_state
from bench.serving.plugin_path import write_plugin_metadata
from bench.serving.variants import FRSPEC, Tree, Variant
from examples.smollm2_135m.serving import free_port
from sgl_frspec.serve import server_command
from sgl_frspec.server_process import ServerError, ServerProcess

# Of the free memory; what is left is for CUDA contexts, graphs and workspaces of all servers.
SHARED_FRACTION = 0.82
# Where the pools are given in tokens, the fraction must only not be what limits them: SGLang
# compares it with memory that other servers fill meanwhile.
UNLIMITING_FRACTION = 0.97
FRSPEC_BACKEND = "frspec"
_PROGRESS_SECONDS = 10.0
Say = Callable[[str], None]


@dataclass(frozen=True)
class Settings:
    """What all servers of a comparison have in common.

    Attributes:
        target, draft, token_map: the model.
        tree: drafted by all that speculate.
        logs: folder for a log file each.
        gpu: whether they run on a GPU; else on the CPU engine.
        backend: attention backend of variants that name none; on a GPU only.
        batches: batch sizes that need a CUDA graph.
        start_together: start all at once, with ``kv_tokens`` each; else one after the other, and
            each takes an equal share of the memory, so that its KV capacity can be compared.
        kv_tokens: capacity of each pool, where it is given in tokens.
        start_seconds: after which a server that is not ready has failed.
        flags: for all of them.
    """

    target: Path
    draft: Path
    token_map: Path
    tree: Tree
    logs: Path
    gpu: bool
    backend: str
    batches: tuple[int, ...]
    start_together: bool
    kv_tokens: int
    start_seconds: float
    flags: tuple[str, ...] = ()

    def backend_of(self, variant: Variant) -> str:
        """The attention backend of one server: its own, FRSPEC's for FRSPEC, or the default."""
        own = FRSPEC_BACKEND if self.gpu and variant.base == FRSPEC else self.backend
        return variant.backend or own


@dataclass
class Server:
    """A running server and what it said about itself.

    Attributes:
        start_seconds: from the command to the first healthy answer, beside its neighbours' starts.
        kv_tokens: what its pool holds.
    """

    variant: Variant
    process: ServerProcess
    start_seconds: float = 0.0
    kv_tokens: int = 0

    @property
    def url(self) -> str:
        """Where it listens."""
        return self.process.url


@dataclass
class Fleet:
    """Servers that are ready, and the failures of those that are not, by variant name."""

    servers: list[Server] = field(default_factory=list)
    failures: dict[str, str] = field(default_factory=dict)

    def idle_cores(self, but: Server | None = None, seconds: float = 1.5) -> float:
        """Processor cores that the servers use, except one, while nobody asks them anything."""
        others = [server for server in self.servers if server is not but]
        share = CpuShare(pid for server in others for pid in server.process.processes())
        time.sleep(seconds)
        return share.cores()


@contextmanager
def running(variants: Sequence[Variant], settings: Settings, say: Say) -> Iterator[Fleet]:
    """Start a server for each variant; all are gone when the block ends.

    One that does not get ready is stopped and reported in ``failures``, with its last log lines.
    """
    fleet = Fleet()
    settings.logs.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        started, share = [], _share(len(variants))
        for variant in variants:
            memory = _memory_flags(settings, share)
            server = Server(variant, stack.enter_context(_start(variant, settings, memory)))
            started.append(server)
            if not settings.start_together:
                _wait(server, fleet, settings.start_seconds, say)
        if settings.start_together:
            for server in started:
                _wait(server, fleet, settings.start_seconds, say)
        try:
            yield fleet
        finally:
            _stop_together(started)


def _stop_together(servers: Sequence[Server]) -> None:
    """SGLang takes seconds to end, which add up for one server after the other."""
    with ThreadPoolExecutor(max(1, len(servers))) as pool:
        for _ in pool.map(lambda server: server.process.stop(), servers):
            pass


def _start(variant: Variant, settings: Settings, memory: Sequence[str]) -> ServerProcess:
    port = free_port()
    flags = [
        *("--model-path", str(settings.target), "--host", "127.0.0.1", "--port", str(port)),
        # SGLang's own choice on a GPU compiles kernels when a server first samples.
        *("--random-seed", "1", "--sleep-on-idle", "--sampling-backend", "pytorch"),
        *(*memory, *settings.flags),
        *variant.speculative_flags(settings.draft, settings.token_map, settings.tree),
    ]
    if settings.gpu:
        sizes = [str(batch) for batch in settings.batches]
        flags += ["--attention-backend", settings.backend_of(variant)]
        flags += ["--cuda-graph-bs-decode", *sizes, "--cuda-graph-backend-prefill", "disabled"]
    flags += variant.flags
    environment = _environment(settings.logs)
    command = server_command(flags, environment, gpu=settings.gpu)
    log = settings.logs / f"{variant.name}-{settings.tree}.log"
    return ServerProcess(command, f"http://127.0.0.1:{port}", log)


def _memory_flags(settings: Settings, share: int | None) -> list[str]:
    """Flags that size a pool: in tokens, or so that weights and pool take ``share`` bytes."""
    tokens = ["--max-total-tokens", str(settings.kv_tokens)]
    if not settings.gpu:
        return tokens
    state = gpu_state()
    if settings.start_together or share is None or state is None:
        return [*tokens, "--mem-fraction-static", str(UNLIMITING_FRACTION)]
    # SGLang takes the fraction of what is free when a server starts.
    return ["--mem-fraction-static", f"{share / state.free:.4f}"]


def _share(servers: int) -> int | None:
    """Bytes of the GPU for each of several servers; None where they cannot be seen."""
    state = gpu_state()
    return int(state.free * SHARED_FRACTION) // servers if state else None


def _environment(folder: Path) -> dict[str, str]:
    """This process's, with the plugin where SGLang finds it though it is not installed."""
    environment = dict(os.environ)
    root = Path(sgl_frspec.__file__).parents[1]
    paths = [str(root), str(root / "triton_kernels"), environment.get("PYTHONPATH", "")]
    plugins = importlib.metadata.entry_points(group="sglang.srt.plugins")
    if "frspec" not in plugins.names:
        paths.insert(0, str(write_plugin_metadata(folder / "plugin")))
    environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    return environment


def _wait(server: Server, fleet: Fleet, seconds: float, say: Say) -> None:
    name, shown = server.variant.name, 0.0

    def progress(passed: float, line: str) -> None:
        nonlocal shown
        if passed - shown >= _PROGRESS_SECONDS:
            shown = passed
            say(f"{name} starting, {passed:.0f} s: {line[-120:]}")

    try:
        server.process.wait_until_ready(seconds, progress)
        server.start_seconds = server.process.seconds
        server.kv_tokens = int(client.get(server.url, "/server_info")["max_total_num_tokens"])
    except (ServerError, client.RequestFailedError, KeyError) as error:
        server.process.stop()
        fleet.failures[name] = f"{type(error).__name__}: {error}"
        say(f"{name} FAILED: {error}")
        return
    fleet.servers.append(server)
    say(f"{name} ready after {server.start_seconds:.0f} s, {server.kv_tokens:,} tokens of KV cache")


def kv_tokens_that_fit(servers: int, weight_bytes: int, kv_bytes: int, wanted: int) -> int:
    """How large a pool each of several servers can have, up to ``wanted`` tokens.

    Args:
        servers: how many share the GPU.
        weight_bytes: of one.
        kv_bytes: of one token.
        wanted: what the largest workload needs.

    Raises:
        ValueError: not even a small pool fits.
    """
    state = gpu_state()
    if state is None:
        return wanted
    each = int(state.free * SHARED_FRACTION) // servers - weight_bytes
    tokens = each // kv_bytes
    if tokens < 4096:
        raise ValueError(
            f"{servers} servers of {weight_bytes / 1e9:.1f} GB do not fit beside each other into"
            f" {state.free / 1e9:.0f} GB: name fewer variants, or use --place in-turn"
        )
    return min(tokens, wanted)
