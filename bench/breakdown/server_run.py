"""Start SGLang servers, time their rounds, trace them, and split the traces."""

import multiprocessing
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from bench.breakdown.parts import Split
from bench.breakdown.server_trace import Traced, split_file
from bench.serving import client
from bench.serving.chain import SEGMENT, Chain
from bench.serving.chain_model import make_chain_model
from bench.serving.measure import Lengths, middle, take_turns
from bench.serving.prompts import ChainPrompts, Workload
from bench.serving.servers import Fleet, Say, Settings, kv_tokens_that_fit, running
from bench.serving.shapes import Shape
from bench.serving.trace_file import TraceError, record
from bench.serving.variants import EAGLE, EAGLE_MAP, FRSPEC, Tree, Variant
from sgl_frspec.explain import ModelShape, Speculation

TRACED = 20
TOKENS_A_ROUND = 8  # at most, in the answers that are traced
# FRSPEC attends with its own kernels, the stock servers with the backend that is asked for.
OWN_BACKEND = "frspec"
LENGTHS = Lengths(short=32, long=192)
TURNS = 3
STOCK, OURS = "stock", "frspec"


@dataclass(frozen=True)
class Asked:
    """A server to measure: stock SGLang or FRSPEC, with a map of ``size`` ids or without one."""

    name: str
    size: int | None

    @classmethod
    def parse(cls, text: str) -> "Asked":
        """From ``stock``, ``stock:32768`` or ``frspec:32768``.

        Raises:
            ValueError: the text is something else.
        """
        name, colon, size = text.partition(":")
        known = name in (STOCK, OURS) and (not colon or (size.isdigit() and int(size)))
        if not known or (name == OURS and not colon):
            raise ValueError(
                f"--servers {text!r}: write {STOCK} for the whole vocabulary, {STOCK}:N or "
                f"{OURS}:N for a map of N ids"
            )
        return cls(name, int(size) if colon else None)

    def variant(self, map_file: Path) -> Variant:
        """How ``bench.serving`` starts it."""
        if self.size is None:
            return Variant(self.name, EAGLE)
        base, backend = (FRSPEC, OWN_BACKEND) if self.name == OURS else (EAGLE_MAP, "")
        flags = ("--speculative-token-map", str(map_file))
        return Variant(f"{self.name}-{self.size}", base, backend, flags)


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


def variants(chain: Chain, folder: Path, asked: Iterable[Asked]) -> dict[Variant, Asked]:
    """Servers to start, with their maps in ``folder``.

    A small map holds the tokens that the chain comes to first, so requests accept as many drafts
    with it as with a large one, and all servers run as many rounds.
    """
    order = chain.order.roll(-SEGMENT)  # prompts end with the first segment
    ranked = order[chain.hot[order]].tolist()
    servers = {}
    for each in asked:
        path = folder / f"map-{each.size}.pt"
        if each.size is not None:
            torch.save(ranked[: each.size], path)
        servers[each.variant(path)] = each
    return servers


def measure(
    name: str,
    shape: ModelShape,
    spec: Speculation,
    asked: Sequence[Asked],
    *,
    backend: str,
    repeat: int,
    model_folder: Path,
    out: Path,
    start_seconds: float,
    keep_traces: bool,
    say: Say,
    found: Callable[[list[Split]], None],
) -> dict[str, str]:
    """Time and trace all servers in turn, ``repeat`` times over.

    Args:
        name: of the model, for its folder.
        shape, spec: model and tree, batch, context.
        asked: servers; one of them at least with a map, all maps smaller than the vocabulary.
        backend: attention backend of the stock servers.
        repeat: how often everything is measured.
        model_folder: where the model is written, or found.
        out: for logs and traces.
        start_seconds: after which a server that is not ready has failed.
        keep_traces: leave the traces in ``out``.
        say: reports progress.
        found: is given the splits of each repetition.

    Returns:
        Why the servers failed that did.

    Raises:
        ValueError: bad maps, or the servers do not fit beside each other on the GPU.
    """
    sizes = [each.size for each in asked if each.size is not None]
    if not sizes or max(sizes) >= shape.vocab:
        raise ValueError(f"maps of {sizes} ids: name a server with fewer than {shape.vocab} ids")
    served = serving_shape(name, shape, max(sizes))
    model = make_chain_model(model_folder / name, served)
    say(f"model of {served.weight_bytes / 1e9:.1f} GB ready")
    tree = Tree(spec.steps, spec.top_k, spec.nodes)
    workload = Workload(spec.batch, spec.context)
    with TemporaryDirectory() as scratch:
        servers = variants(model.chain, Path(scratch), asked)
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
            kv_tokens=_kv_tokens(served, workload, tree, len(servers)),
            start_seconds=start_seconds,
            flags=("--max-running-requests", str(spec.batch), "--skip-tokenizer-init"),
        )
        traces = out / "traces" if keep_traces else Path(scratch) / "traces"
        prompts = ChainPrompts(model.chain)
        with running(list(servers), settings, say) as fleet:
            for turn in range(repeat):
                folder = traces / str(turn + 1)
                taken = _traced(fleet, servers, workload, prompts, shape.vocab, spec, folder, say)
                found(_splits(taken, fleet))
    return fleet.failures


def _traced(
    fleet: Fleet,
    servers: dict[Variant, Asked],
    workload: Workload,
    prompts: ChainPrompts,
    vocab: int,
    spec: Speculation,
    folder: Path,
    say: Say,
) -> list[Traced]:
    """Rounds timed while nothing is traced, then one trace of each server."""
    samples = take_turns(fleet.servers, workload, prompts, LENGTHS, TURNS, say)
    traced = []
    for server in list(fleet.servers):
        variant = server.variant
        try:
            if not samples[variant.name]:
                raise TraceError(f"no round was timed: {server.process.log_tail()}")
            path = record(
                server.url,
                prompts.of(workload),
                folder / variant.name,
                rounds=TRACED,
                new_tokens=TOKENS_A_ROUND * TRACED,
                activities=["CPU", "GPU"],
            )
        except (TraceError, client.RequestFailedError) as error:
            fleet.failures[variant.name] = str(error)
            fleet.servers.remove(server)
            continue
        rounds = [sample.ms_per_round for sample in samples[variant.name]]
        cycle_us = 1e3 * middle(rounds)
        size = servers[variant].size
        traced.append(Traced(path, servers[variant].name, size or vocab, spec.steps, cycle_us))
        accepted = middle([sample.accept_length for sample in samples[variant.name]])
        say(
            f"{variant.name}: {cycle_us:.0f} us a round ({min(rounds) * 1e3:.0f} to "
            f"{max(rounds) * 1e3:.0f}), accept length {accepted:.2f}; {path}"
        )
    return traced


def _splits(traced: Sequence[Traced], fleet: Fleet) -> list[Split]:
    """Splits of traces, read by one process each: a trace takes seconds."""
    if not traced:
        return []
    splits = []
    # Forked processes would inherit this one's CUDA context.
    with ProcessPoolExecutor(len(traced), multiprocessing.get_context("spawn")) as pool:
        results = [(each, pool.submit(split_file, each)) for each in traced]
        for each, result in results:
            try:
                splits.append(result.result())
            except TraceError as error:
                fleet.failures[f"{each.implementation}:{each.vocab}"] = f"{each.path}: {error}"
    return splits


def _kv_tokens(shape: Shape, workload: Workload, tree: Tree, servers: int) -> int:
    longest = max(LENGTHS.long, TOKENS_A_ROUND * TRACED)
    tokens = workload.kv_tokens(longest, tree.nodes, tree.top_k, tree.steps)
    wanted = 2 * tokens + 4096
    return kv_tokens_that_fit(servers, shape.weight_bytes, shape.kv_bytes_per_token, wanted)
