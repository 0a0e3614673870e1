"""Time the rounds of running servers, trace them, and split the traces."""

import multiprocessing
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from bench.breakdown.parts import Split
from bench.breakdown.server_clock import Stretch, time_in_turns
from bench.breakdown.server_trace import Traced, split_file
from bench.serving import client
from bench.serving.measure import middle
from bench.serving.prompts import ChainPrompts, Workload
from bench.serving.servers import Fleet, Say, Server
from bench.serving.trace_file import TraceError, record
from sgl_frspec.explain import Speculation

TRACED = 20
TOKENS_A_ROUND = 8  # at most, in the answers that are traced


@dataclass
class Rounds:
    """What all measurements of a fleet have in common.

    Attributes:
        fleet: a server that fails is taken out of it, and said why.
        prompts, workload, spec: what is asked, and how answers are drafted.
        drafted: implementation and draft vocabulary by variant name.
        deadline: on the monotonic clock, after which no further trace begins.
        say: reports progress.
    """

    fleet: Fleet
    prompts: ChainPrompts
    workload: Workload
    spec: Speculation
    drafted: Mapping[str, tuple[str, int]]
    deadline: float
    say: Say

    def measure(self, folder: Path) -> list[Split]:
        """Rounds timed while nothing is traced, then one trace of each server, in ``folder``."""
        if self._is_late("nothing is measured again"):
            return []
        servers = list(self.fleet.servers)
        steps = self.spec.steps
        timed = time_in_turns(servers, self.workload, self.prompts, steps, self.say)
        traced = []
        for server in servers:
            name = server.variant.name
            if self._is_late(f"no trace of {name}"):
                break
            try:
                traced.append(self._traced(server, timed[name], folder / name))
            except (TraceError, client.RequestFailedError) as error:
                self.fleet.failures[name] = str(error)
                self.fleet.servers.remove(server)
        return self._splits(traced)

    def _is_late(self, consequence: str) -> bool:
        late = time.monotonic() > self.deadline
        if late:
            self.say(f"time limit reached: {consequence}")
        return late

    def _traced(self, server: Server, timed: Sequence[Stretch], folder: Path) -> Traced:
        name = server.variant.name
        if not timed:
            raise TraceError(f"no round was timed: {server.process.log_tail()}")
        path = record(
            server.url,
            self.prompts.of(self.workload),
            folder,
            rounds=TRACED,
            new_tokens=TOKENS_A_ROUND * TRACED,
            activities=["CPU", "GPU"],
        )
        lengths = [stretch.us_per_round for stretch in timed]
        accepted = middle([stretch.accept_length for stretch in timed])
        self.say(
            f"{name}: {middle(lengths):.0f} us a round ({min(lengths):.0f} to {max(lengths):.0f}), "
            f"accept length {accepted:.2f}; {path}"
        )
        implementation, vocab = self.drafted[name]
        return Traced(path, implementation, vocab, self.spec.steps, middle(lengths))

    def _splits(self, traced: Sequence[Traced]) -> list[Split]:
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
                    name = f"{each.implementation}:{each.vocab}"
                    self.fleet.failures[name] = f"{each.path}: {error}"
        return splits
