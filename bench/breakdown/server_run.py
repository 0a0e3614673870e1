"""Start SGLang servers, time their rounds, trace them, and split the traces."""

import dataclasses
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from bench.breakdown.parts import Split
from bench.breakdown.server_trace import TraceError, read_events, split
from bench.serving import client
from bench.serving.chain_model import ChainModel, make_chain_model
from bench.serving.measure import Lengths, middle, take_turns
from bench.serving.prompts import ChainPrompts, Workload
from bench.serving.servers import Say, Server, Settings, kv_tokens_that_fit, running
from bench.serving.shapes import Shape
from bench.serving.variants import EAGLE, EAGLE_MAP, FRSPEC, Tree, Variant
from sgl_frspec.explain import ModelShape, Speculation

TRACED = 24
# FRSPEC attends with its own kernels, the stock servers with the backend that is asked for.
OWN_BACKEND = "frspec"
LENGTHS = Lengths(short=32, long=192)
TURNS = 3
_TRACE_SECONDS = 60.0


def serving_shape(name: str, shape: ModelShape, largest_map: int) -> Shape:
    """The shape as ``bench serve`` makes models of it; every one is of Llama's architecture."""
    return Shape(
        name=name,
        source=name,
        vocab=shape.vocab,
        hidden=shape.hidden,
        intermediate=shape.intermediate,
        layers=shape.layers,
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        hot=largest_map,
    )


def variants(model: ChainModel, folder: Path, maps: Sequence[int]) -> dict[Variant, int | None]:
    """Stock EAGLE with the whole vocabulary; with each map, stock EAGLE and FRSPEC.

    Returns:
        Servers to start, with the size of the map; None is the whole vocabulary.
    """
    servers: dict[Variant, int | None] = {Variant("stock", EAGLE): None}
    ranked = torch.load(model.token_map, weights_only=True)
    for size in maps:
        path = folder / f"map-{size}.pt"
        torch.save(ranked[:size], path)
        flags = ("--speculative-token-map", str(path))
        servers[Variant(f"stock-map-{size}", EAGLE_MAP, flags=flags)] = size
        servers[Variant(f"frspec-{size}", FRSPEC, OWN_BACKEND, flags)] = size
    return servers


def measure(
    name: str,
    shape: ModelShape,
    spec: Speculation,
    maps: Sequence[int],
    *,
    backend: str,
    model_folder: Path,
    out: Path,
    start_seconds: float,
    keep_traces: bool,
    say: Say,
) -> tuple[list[Split], dict[str, str]]:
    """Splits of all servers that ran, and why the others did not.

    Args:
        name: of the model, for its folder.
        shape, spec: model and tree, batch, context.
        maps: sizes of token maps, the largest below the vocabulary.
        backend: attention backend.
        model_folder: where the model is written, or found.
        out: for logs and traces.
        start_seconds: after which a server that is not ready has failed.
        keep_traces: leave the traces in ``out``.
        say: reports progress.

    Raises:
        ValueError: they do not fit beside each other on the GPU.
    """
    if not maps or max(maps) >= shape.vocab:
        raise ValueError(f"maps of {list(maps)} ids: give sizes below {shape.vocab} tokens")
    served = serving_shape(name, shape, max(maps))
    model = make_chain_model(model_folder / name, served)
    tree = Tree(spec.steps, spec.top_k, spec.nodes)
    workload = Workload(spec.batch, spec.context)
    with tempfile.TemporaryDirectory() as scratch:
        sizes = variants(model, Path(scratch), maps)
        settings = Settings(
            model.target,
            model.draft,
            model.token_map,
            tree=tree,
            logs=out / "logs",
            gpu=True,
            backend=backend,
            batches=(spec.batch,),
            start_together=True,
            kv_tokens=_kv_tokens(served, workload, tree, len(sizes)),
            start_seconds=start_seconds,
            flags=("--max-running-requests", str(spec.batch), "--skip-tokenizer-init"),
        )
        traces = out / "traces" if keep_traces else Path(scratch) / "traces"
        splits = []
        with running(list(sizes), settings, say) as fleet:
            prompts = ChainPrompts(model.chain)
            taken = take_turns(fleet.servers, workload, prompts, LENGTHS, TURNS, say)
            for server in fleet.servers:
                samples = taken[server.variant.name]
                if not samples:
                    fleet.failures[server.variant.name] = server.process.log_tail()
                    continue
                cycle_us = 1e3 * middle([sample.ms_per_round for sample in samples])
                texts = prompts.of(workload)
                try:
                    path = _trace(server, texts, traces / server.variant.name)
                    found = split(
                        read_events(path),
                        implementation=server.variant.name,
                        vocab=sizes[server.variant] or shape.vocab,
                        steps=spec.steps,
                        cycle_us=cycle_us,
                    )
                except (TraceError, client.RequestFailedError) as error:
                    fleet.failures[server.variant.name] = str(error)
                    continue
                splits.append(_named(found))
                say(f"{server.variant.name}: {cycle_us:.0f} us a round, {found.busy_us:.0f} busy")
        return splits, fleet.failures


def _named(split: Split) -> Split:
    """The same under the name of its implementation, without the map's size."""
    name, _, size = split.implementation.rpartition("-")
    return dataclasses.replace(split, implementation=name) if size.isdigit() else split


def _kv_tokens(shape: Shape, workload: Workload, tree: Tree, servers: int) -> int:
    tokens = workload.kv_tokens(16 * TRACED, tree.nodes, tree.top_k, tree.steps)
    wanted = 2 * tokens + 8192
    return kv_tokens_that_fit(servers, shape.weight_bytes, shape.kv_bytes_per_token, wanted)


def _trace(server: Server, texts: Sequence[Sequence[int]], folder: Path) -> Path:
    """Trace ``TRACED`` rounds, host and GPU, of a batch that the server is generating for."""
    folder.mkdir(parents=True, exist_ok=True)
    errors: list[client.RequestFailedError] = []

    def ask() -> None:
        try:
            client.generate(server.url, texts, 16 * TRACED)
        except client.RequestFailedError as error:
            errors.append(error)

    request = threading.Thread(target=ask)
    request.start()
    time.sleep(0.3)  # the prefill is over
    body = {"output_dir": str(folder.absolute()), "num_steps": TRACED}
    body |= {"activities": ["CPU", "GPU"], "with_stack": False}
    client.post(server.url, "/start_profile", body, timeout=60)
    request.join()
    if errors:
        raise errors[0]
    return _complete_trace(folder)


def _complete_trace(folder: Path) -> Path:
    end = time.monotonic() + _TRACE_SECONDS
    while time.monotonic() < end:
        for path in folder.rglob("*.trace.json.gz"):
            size = path.stat().st_size
            time.sleep(0.5)
            if 0 < size == path.stat().st_size:
                return path
        time.sleep(0.5)
    raise TraceError(f"no trace in {folder} after {_TRACE_SECONDS:.0f} s")
