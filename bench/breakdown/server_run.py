"""Start the SGLang servers of a model, and have their rounds measured."""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from bench.breakdown.parts import Split
from bench.breakdown.server_clock import NEW_TOKENS
from bench.breakdown.server_rounds import TOKENS_A_ROUND, TRACED, Rounds
from bench.serving.chain import SEGMENT, Chain
from bench.serving.chain_model import make_chain_model
from bench.serving.prompts import ChainPrompts, Workload
from bench.serving.servers import Say, Settings, kv_tokens_that_fit, running
from bench.serving.shapes import Shape
from bench.serving.variants import EAGLE, EAGLE_MAP, FRSPEC, Tree, Variant
from sgl_frspec.explain import ModelShape, Speculation

# FRSPEC attends with its own kernels, the stock servers with the backend that is asked for.
OWN_BACKEND = "frspec"
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
    time_limit: float,
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
        time_limit: seconds after which no further trace begins; infinity for no limit.
        keep_traces: leave the traces in ``out``.
        say: reports progress.
        found: is given the splits of each repetition.

    Returns:
        Why the servers failed that did.

    Raises:
        ValueError: bad maps, or the servers do not fit beside each other on the GPU.
    """
    deadline = time.monotonic() + time_limit
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
            rounds = Rounds(fleet, prompts, workload, spec, _drafted(servers, shape), deadline, say)
            for turn in range(repeat):
                folder = traces / str(turn + 1)
                found(rounds.measure(folder))
    return fleet.failures


def _drafted(servers: Mapping[Variant, Asked], shape: ModelShape) -> dict[str, tuple[str, int]]:
    return {v.name: (each.name, each.size or shape.vocab) for v, each in servers.items()}


def _kv_tokens(shape: Shape, workload: Workload, tree: Tree, servers: int) -> int:
    longest = max(NEW_TOKENS, TOKENS_A_ROUND * TRACED)
    tokens = workload.kv_tokens(longest, tree.nodes, tree.top_k, tree.steps)
    wanted = 2 * tokens + 4096
    return kv_tokens_that_fit(servers, shape.weight_bytes, shape.kv_bytes_per_token, wanted)
