"""One comparison: servers of one model and tree, measured under one workload after the other."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from bench.serving import client, trace
from bench.serving.machine import gpu_state
from bench.serving.measure import Lengths, Sample, take_turns
from bench.serving.prompts import Prompts, Workload
from bench.serving.rows import Row, summary
from bench.serving.servers import Fleet, Say, Server, Settings, running
from bench.serving.variants import Variant

PROFILED_ROUNDS = 40
# An idle server polls a few times a second; one that spins takes a core.
IDLE_CORES = 0.5
IDLE_GPU = 0.02


@dataclass(frozen=True)
class Plan:
    """What to compare.

    Attributes:
        run: names the run in the rows.
        shape: names the model in the rows.
        side_by_side: all servers run at once and take turns; else each turn starts its server.
        profiled: workloads whose rounds are traced after they have been timed.
        deadline: ``time.monotonic()`` after which no workload begins.
    """

    run: str
    shape: str
    settings: Settings
    variants: Sequence[Variant]
    workloads: Sequence[Workload]
    prompts: Prompts
    lengths: Lengths
    alternations: int
    side_by_side: bool
    profiled: Sequence[Workload]
    deadline: float
    traces: Path


@dataclass
class _Record:
    """What is known of one variant."""

    samples: dict[Workload, list[Sample]] = field(default_factory=dict)
    profiles: dict[Workload, trace.RoundProfile] = field(default_factory=dict)
    starts: list[float] = field(default_factory=list)
    kv_tokens: int = 0


class Comparison:
    """Runs a plan; ``failures`` and ``undone`` say afterwards what there are no rows of."""

    def __init__(self, plan: Plan, say: Say) -> None:
        self._plan, self._say = plan, say
        self._records = {variant.name: _Record() for variant in plan.variants}
        self.failures: dict[str, str] = {}
        self.undone: list[Workload] = []
        self._unfit: set[tuple[str, Workload]] = set()  # variants that cannot hold a workload

    def cases(self) -> Iterator[list[Row]]:
        """The rows of each workload as soon as they are timed, and again when they are traced."""
        if self._plan.side_by_side:
            yield from self._side_by_side()
        else:
            yield from self._in_turn()

    def _side_by_side(self) -> Iterator[list[Row]]:
        with running(self._plan.variants, self._plan.settings, self._say) as fleet:
            self._know(fleet)
            if fleet.servers:
                self._check_idle(fleet)
            for workload in self._plan.workloads:
                able = self._able(workload, fleet)
                if not able:
                    self.undone += [workload] if fleet.servers else []
                    continue
                self._measure(fleet, able, workload, self._plan.alternations)
                yield self._rows(workload)
                if self._profile(fleet, able, workload):
                    yield self._rows(workload)

    def _in_turn(self) -> Iterator[list[Row]]:
        for _ in range(self._plan.alternations):
            for variant in self._plan.variants:
                if time.monotonic() > self._plan.deadline or variant.name in self.failures:
                    continue
                with running([variant], self._plan.settings, self._say) as fleet:
                    self._know(fleet)
                    for workload in self._plan.workloads:
                        if able := self._able(workload, fleet):
                            self._measure(fleet, able, workload, 1)
                            self._profile(fleet, able, workload)
        for workload in self._plan.workloads:
            rows = self._rows(workload)
            if not self._is_complete(workload):
                self._say(f"batch {workload.batch}, context {workload.context:,}: time limit")
            if not (rows and self._is_complete(workload)):
                self.undone.append(workload)
            if rows:
                yield rows

    def _is_complete(self, workload: Workload) -> bool:
        return all(
            len(record.samples.get(workload, ())) == self._plan.alternations
            for name, record in self._records.items()
            if name not in self.failures and (name, workload) not in self._unfit
        )

    def _know(self, fleet: Fleet) -> None:
        self.failures |= fleet.failures
        for server in fleet.servers:
            record = self._records[server.variant.name]
            record.starts.append(server.start_seconds)
            record.kv_tokens = server.kv_tokens

    def _check_idle(self, fleet: Fleet) -> None:
        cores = fleet.idle_cores()
        gpu = gpu_state()
        busy = gpu.busy if gpu else 0.0
        idle = cores < IDLE_CORES * len(fleet.servers) and busy < IDLE_GPU
        self._say(
            f"servers between requests: {cores:.2f} processor cores in all, GPU busy {busy:.0%}"
            f" of the time: {'idle' if idle else 'NOT IDLE'}"
        )

    def _able(self, workload: Workload, fleet: Fleet) -> list[Server]:
        """The servers that can take a workload; none when the time is over."""
        plan, tree = self._plan, self._plan.settings.tree
        longest = plan.lengths.long
        if workload in plan.profiled:
            longest = max(longest, trace.answer_tokens(PROFILED_ROUNDS))
        needed = workload.kv_tokens(longest, tree.nodes, tree.top_k, tree.steps)
        late = time.monotonic() > plan.deadline
        able = []
        for server in fleet.servers:
            if not late and server.kv_tokens >= needed:
                able.append(server)
                continue
            reason = f"needs {needed:,} tokens of KV cache, {server.kv_tokens:,} are there"
            self._say(
                f"batch {workload.batch}, context {workload.context:,}, {server.variant.name} left"
                f" out: {'time limit' if late else reason}"
            )
            if not late:
                self._unfit.add((server.variant.name, workload))
        return able

    def _measure(
        self, fleet: Fleet, able: Sequence[Server], workload: Workload, alternations: int
    ) -> None:
        plan = self._plan
        taken = take_turns(able, workload, plan.prompts, plan.lengths, alternations, self._say)
        for server in able:
            name = server.variant.name
            samples = taken[name]
            self._records[name].samples.setdefault(workload, []).extend(samples)
            if len(samples) < alternations:
                fleet.servers.remove(server)
                self.failures[name] = server.process.log_tail()

    def _profile(self, fleet: Fleet, able: Sequence[Server], workload: Workload) -> bool:
        """Trace rounds of a workload that has not been traced; whether anything came of it."""
        if workload not in self._plan.profiled:
            return False
        texts = self._plan.prompts.of(workload)
        found = False
        for server in able:
            name = server.variant.name
            profiles = self._records[name].profiles
            if server not in fleet.servers or workload in profiles:
                continue
            folder = self._plan.traces / f"{name}-{workload.batch}-{workload.context}"
            try:
                profiles[workload] = trace.profile(server, texts, folder, PROFILED_ROUNDS)
                found = True
            except (trace.TraceError, client.RequestFailedError) as error:
                self._say(f"{name}: no profile: {error}")
        return found

    def _rows(self, workload: Workload) -> list[Row]:
        rows = []
        for variant in self._plan.variants:
            record = self._records[variant.name]
            if samples := record.samples.get(workload):
                row = self._row(variant, workload, record, samples)
                if workload in record.profiles:
                    row.add_profile(record.profiles[workload])
                rows.append(row)
        return rows

    def _row(
        self, variant: Variant, workload: Workload, record: _Record, samples: list[Sample]
    ) -> Row:
        plan, settings = self._plan, self._plan.settings
        expected, tokens = None, samples[-1].answer_tokens
        if variant.speculates:
            expected = plan.prompts.expected_accept(
                workload, tokens, settings.tree.steps, variant.mapped
            )
        return Row(
            run=plan.run,
            shape=plan.shape,
            tree=str(settings.tree),
            variant=variant.name,
            base=variant.base,
            backend=settings.backend_of(variant),
            flags=" ".join((*settings.flags, *variant.flags)),
            batch=workload.batch,
            context=workload.context,
            expected_accept=expected,
            requests=2 * workload.batch * len(samples),
            answer_tokens=tokens,
            start_s=round(median(record.starts), 1),
            kv_tokens=record.kv_tokens,
            kv_capped=settings.start_together or not settings.gpu,
            **summary(samples),
        )
