"""One run of ``bench map-sizes``: its servers, and what was measured so far."""

import argparse
import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

import torch

from bench.environment import describe
from bench.serving import map_choice, text_report
from bench.serving.client import Answer
from bench.serving.map_size_models import ServedModel
from bench.serving.map_size_profile import profile_round
from bench.serving.map_size_request import check_names, check_numbers, make_folder
from bench.serving.map_speed import Speed, accept_by_domain, table
from bench.serving.measure import Lengths
from bench.serving.scoring import generated_with_scores, rounding_bound, scored
from bench.serving.servers import Fleet, Say, Server, Settings
from bench.serving.traffic import Asking, Turn, mixed, take_turns
from bench.serving.variants import EAGLE_MAP, FRSPEC, PLAIN, Variant, flag_words, parse_variants
from bench.serving.verify_text import behind_after, judge
from sgl_frspec.maps import load_token_map
from sgl_frspec.maps.commands.arguments import parse_size
from sgl_frspec.maps.files import atomic_file
from sgl_frspec.maps.torch_files import torch_file_bytes

FULL = "full"
RESULTS = "map_sizes.json"
EARLIER = "map_sizes.earlier.json"
SIZE_FLAG = "--frspec-map-size"


class MapSizeRun:
    """Servers of one model that differ in what they draft over.

    Args:
        args: of the command.
        model: what they serve.
        gpu: whether they run on one.
        began: ``time.monotonic()`` that the time limit counts from.
        say: reports progress.

    Raises:
        ValueError: a size that the map does not have, or variants that cannot be told apart.
    """

    def __init__(
        self, args: argparse.Namespace, model: ServedModel, gpu: bool, began: float, say: Say
    ) -> None:
        check_numbers(args)
        self._flags = flag_words(args.flags, "--flags")
        self.args, self.model, self._gpu, self._say = args, model, gpu, say
        self._deadline = began + args.time_limit if args.time_limit else float("inf")
        self._map = load_token_map(model.token_map)
        kept = {name: prompts[: args.per_domain] for name, prompts in model.domains.items()}
        self.prompts = mixed(kept)
        if max(args.batch) > len(self.prompts):
            raise ValueError(
                f"--batch {max(args.batch)}: there are {len(self.prompts)} prompts; give more, or"
                " smaller batches"
            )
        self._asking = Asking(Lengths(args.short_tokens, args.tokens), model.ignore_eos)
        self._by_size = {
            size: f"frspec-{size}" for size in sorted({self._size(text) for text in args.sizes})
        }
        self.variants = parse_variants(args.variant)
        stock = {self._size(text) for text in args.stock_size}
        self._stock_sizes = {f"eagle-{size}": size for size in sorted(stock)}
        self.variants += [self._stock(*item) for item in self._stock_sizes.items()]
        self.variants += [
            Variant(name, FRSPEC, "", (SIZE_FLAG, str(size)))
            for size, name in self._by_size.items()
        ]
        check_names(self.variants, args.profile)
        self._vocabularies = {v.name: self._drafted(v) for v in self.variants}
        if args.check_text and all(variant.base != PLAIN for variant in self.variants):
            raise ValueError(f"--check-text needs a server that judges: --variant {PLAIN}")
        self.results: dict[str, object] = {
            "model": model.name,
            "tree": str(args.tree),
            "machine": describe(torch.device("cuda" if gpu else "cpu")),
        }
        self._prepare_out()

    def _size(self, text: str) -> int:
        size = self.model.vocab if text == FULL else parse_size(text)
        if size > len(self._map):
            raise ValueError(f"size {text}: the map has {len(self._map)} ids")
        return size

    def _stock(self, name: str, size: int) -> Variant:
        """Stock SGLang drafts over all of a file: one with the map's first ids alone."""
        path = str(self._stock_map(size))
        return Variant(name, EAGLE_MAP, "", ("--speculative-token-map", path))

    def _stock_map(self, size: int) -> Path:
        return self.args.out / f"map-{size}.pt"

    def _prepare_out(self) -> None:
        """Make ``--out`` with the maps of stock servers; what an earlier run found goes aside."""
        out: Path = self.args.out
        make_folder(out)
        if (out / RESULTS).exists():
            (out / RESULTS).replace(out / EARLIER)
        for size in self._stock_sizes.values():
            self._stock_map(size).write_bytes(torch_file_bytes(self._map.ids[:size]))

    def settings(self) -> Settings:
        """Of all servers; each pool holds every prompt with its answer."""
        args, tree = self.args, self.args.tree
        room = args.tokens + 2 * (tree.nodes + tree.top_k * tree.steps) + 64
        batches = {*args.batch, args.answer_batch}
        return Settings(
            *(self.model.target, self.model.draft, self.model.token_map),
            tree=tree,
            logs=args.out / "logs",
            gpu=self._gpu,
            backend=args.attention_backend if self._gpu else "frspec_cpu",
            batches=tuple(sorted(batches)),
            start_together=True,
            kv_tokens=sum(len(prompt.ids) + room for prompt in self.prompts) + 4096,
            start_seconds=args.start_seconds,
            flags=(
                *("--max-running-requests", str(max(batches))),
                *self.model.flags,
                *self._flags,
            ),
        )

    def measure(self, fleet: Fleet) -> int:
        """Everything, partial results as they come; the exit status.

        ``finished`` is recorded when every server was measured, be its texts right or wrong.
        """
        if not fleet.servers:
            self._say("no server started: nothing is measured")
            return 1
        answers = self._asking.all_answers(
            fleet.servers, self.prompts, self.args.answer_batch, self._say
        )
        servers = [server for server in fleet.servers if server.variant.name in answers]
        complete = len(servers) == len(self.variants)
        accept = {name: accept_by_domain(self.prompts, found) for name, found in answers.items()}
        self._record("accept", accept)
        self._say_accept(accept)
        right = self._same_texts(servers, answers)
        apart = 0
        alone: dict[str, Speed] = {}
        for batch in self.args.batch:
            speeds = self._time(servers, batch, accept)
            complete &= len(speeds) == len(servers)
            if batch == 1:
                alone = speeds
                apart = self._choose(speeds, answers)
        self._profile(servers, alone)
        self._record("finished", complete)
        return 1 if not (right and complete) else 3 if apart > 1 else 0

    def _record(self, key: str, value: object) -> None:
        self.results[key] = value
        with atomic_file(self.args.out / RESULTS) as file:
            file.write(f"{json.dumps(self.results, indent=1)}\n".encode())

    def _say_accept(self, accept: Mapping[str, Mapping[str, float]]) -> None:
        lines = [
            f"  {name}: " + ", ".join(f"{domain} {value:.3f}" for domain, value in row.items())
            for name, row in accept.items()
        ]
        self._say(f"accept lengths of {len(self.prompts)} answers\n" + "\n".join(lines))

    def _same_texts(self, servers: list[Server], answers: Mapping[str, list[Answer]]) -> bool:
        """Whether all texts are those of the target without speculation, but for ties."""
        if not self.args.check_text:
            return True
        plain = next((s for s in servers if s.variant.base == PLAIN), None)
        if plain is None:
            return False
        texts, batch = [prompt.ids for prompt in self.prompts], self.args.answer_batch
        decoded, prefilled = [], []
        for i in range(0, len(texts), batch):
            part = texts[i : i + batch]
            scores = generated_with_scores(plain.url, part, self.args.tokens)
            decoded += scores
            written = [[score.token for score in one] for one in scores]
            prefilled += scored(plain.url, list(zip(part, written, strict=True)))
        bound = rounding_bound(decoded, prefilled)
        self._say(f"two passes of the target move the gap of two logits by up to {bound:.2g}")
        verdicts, known = [], {}
        for server in servers:
            if server is plain:
                continue
            given = answers[server.variant.name]
            verdict = judge(server.variant.name, decoded, given)
            after = behind_after(plain.url, texts, verdict, given, batch, known)
            verdict.behind_after.extend(after)
            verdicts.append(verdict)
            self._say(text_report.describe(verdict, bound))
            self._record("texts", text_report.document(verdicts, bound))
            text_report.write(verdicts, bound, self.args.out)
        return not any(v.unexplained(bound) or v.wrong_after(bound) for v in verdicts)

    def _time(
        self, servers: list[Server], batch: int, accept: Mapping[str, Mapping[str, float]]
    ) -> dict[str, Speed]:
        args = self.args
        texts = [prompt.ids for prompt in self.prompts]
        count = min(args.groups, len(texts) // batch)
        groups = [texts[i * batch : (i + 1) * batch] for i in range(count)]
        speeds: dict[str, Speed] = {}

        def record(taken: Mapping[str, list[Turn]]) -> None:
            found = {name: Speed.of(turns, accept[name]) for name, turns in taken.items()}
            speeds.update(found)
            self._record(f"batch {batch}", {name: asdict(s) for name, s in speeds.items()})

        take_turns(
            *(servers, self._asking, groups, args.alternations, self._deadline, self._say), record
        )
        self._say(f"{self.model.name}, tree {args.tree}, batch {batch}\n{table(speeds)}")
        return speeds

    def _choose(self, speeds: Mapping[str, Speed], answers: Mapping[str, list[Answer]]) -> int:
        """Steps between the best size and the predicted one; 0 where nothing can be predicted."""
        served = {size: speeds[name] for size, name in self._by_size.items() if name in speeds}
        if len(served) < 2:
            return 0
        text = [token for answer in answers[self._by_size[max(served)]] for token in answer.ids]
        try:
            choice = map_choice.choose(
                self._map, self.model.vocab, self.args.tree.steps, served, text
            )
        except ValueError as error:
            self._say(f"no prediction: {error}")
            return 0
        self._say("\n".join(["served, and predicted from both ends", *map_choice.lines(choice)]))
        self._record("choice", choice.record())
        return choice.steps_apart

    def _profile(self, servers: list[Server], alone: Mapping[str, Speed]) -> None:
        """Kernels and parts of the rounds of one request."""
        for server in servers:
            name = server.variant.name
            if name not in self.args.profile:
                continue
            found = profile_round(
                *(server, self.prompts[0].ids, self.args.out / "traces" / name),
                drafted=self._vocabularies[name],
                steps=self.args.tree.steps,
                ms_round=alone[name].ms_round if name in alone else None,
                say=self._say,
            )
            for what, value in found.items():
                self._record(f"{what} of {name}", value)

    def _drafted(self, variant: Variant) -> int:
        """Ids that a variant's draft proposes."""
        size = variant.flag(SIZE_FLAG)
        if size is not None:
            return parse_size(size)
        return self._stock_sizes.get(variant.name, self.model.vocab)
