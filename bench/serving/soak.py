"""``bench serve --soak``: thousands of mixed requests at once; none lost, none wrong, memory flat.

Answers whose tokens nothing but the target chooses are scored after the requests by a server
without speculation: a greedy token must be its best, a sampled one among its ``top_k``, give or
take the rounding between two passes of the target. That server does nothing while requests run, so
what a GPU gains meanwhile is the other's, also where the memory of each process cannot be seen.
"""

import http.client
import json
import random
import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from bench.serving import client
from bench.serving.machine import gpu_bytes_by_process, gpu_state, resident_bytes
from bench.serving.prompts import held_out_texts
from bench.serving.scoring import scored
from bench.serving.servers import Say, Server
from bench.serving.soak_requests import TOP_K, Outcome, Request, draw_request, fault

CONCURRENCY = 64
LONGEST_PROMPT = 1500
SCORED_AT_ONCE = 64
MEMORY_NOTES = 16
# After this share of the requests every code path has run and every pool has its size.
SETTLED_SHARE = 0.25
GPU_GROWTH = 64 << 20
RESIDENT_GROWTH = 0.05
REPORT = "soak.json"
_TIMEOUT = 300.0


@dataclass(frozen=True)
class Memory:
    """After so many requests, in bytes.

    Attributes:
        gpu: what the server's processes hold on the GPU; where that cannot be seen, what all do.
        resident: memory of the machine that the server's processes occupy.
    """

    done: int
    gpu: int
    resident: int


@dataclass
class SoakReport:
    """What a run has shown; ``unsent`` requests came after the time limit."""

    variant: str
    requests: int
    seconds: float = 0.0
    kinds: dict[str, int] = field(default_factory=dict)
    aborted: int = 0
    unsent: int = 0
    faults: list[str] = field(default_factory=list)
    scored_tokens: int = 0
    memory: list[Memory] = field(default_factory=list)

    @property
    def growth(self) -> tuple[int, float]:
        """Bytes on the GPU and share of resident memory gained since the run had settled."""
        settled = next((m for m in self.memory if m.done >= SETTLED_SHARE * self.requests), None)
        if settled is None:
            return 0, 0.0
        last = self.memory[-1]
        return last.gpu - settled.gpu, last.resident / max(1, settled.resident) - 1

    @property
    def flat(self) -> bool:
        """Whether memory stayed what it was."""
        gpu, resident = self.growth
        return gpu <= GPU_GROWTH and resident <= RESIDENT_GROWTH

    @property
    def good(self) -> bool:
        """Whether all was sent and nothing was wrong."""
        return self.flat and not self.faults and not self.unsent

    def text(self) -> str:
        """A few lines."""
        gpu, resident = self.growth
        lines = [
            f"{self.variant}: {self.requests - self.unsent} requests in {self.seconds:.0f} s"
            f" ({', '.join(f'{kind} {count}' for kind, count in sorted(self.kinds.items()))});"
            f" {self.aborted} aborted by the client",
            *([f"NOT SENT, for lack of time: {self.unsent}"] if self.unsent else []),
            f"faults: {len(self.faults)}; {self.scored_tokens:,} tokens scored by the target",
            f"memory since {SETTLED_SHARE:.0%} of the run: GPU {gpu / (1 << 20):+.0f} MiB,"
            f" processes {resident:+.1%}: {'flat' if self.flat else 'GROWING'}",
        ]
        return "\n".join(lines + [f"  {reason}" for reason in self.faults[:20]])


class Soak:
    """Sends requests to ``server`` and has ``judge``, which does not speculate, score them."""

    def __init__(
        self,
        server: Server,
        judge: Server,
        count: int,
        bound: float,
        say: Say,
        deadline: float = float("inf"),
    ) -> None:
        self._server, self._judge, self._count = server, judge, count
        self._bound, self._say, self._deadline = bound, say, deadline
        self._report = SoakReport(server.variant.name, count)
        self._done = 0
        self._lock = threading.Lock()

    def run(self, seed: int = 0) -> SoakReport:
        """All requests, then the judge's view of their answers."""
        draw = random.Random(seed)
        tokens = [token for text in held_out_texts() for token in text]
        longest = min(LONGEST_PROMPT, len(tokens) // 2)
        requests = [draw_request(draw, tokens, longest) for _ in range(self._count)]
        report = self._report
        began = time.monotonic()
        with ThreadPoolExecutor(CONCURRENCY) as pool:
            sent = list(pool.map(self._send, requests))
        report.seconds = time.monotonic() - began
        outcomes = [outcome for outcome in sent if outcome is not None]
        self._say(f"{report.variant}: {len(outcomes)} requests done in {report.seconds:.0f} s")
        report.unsent = len(sent) - len(outcomes)
        silent = self._silent()
        report.kinds = dict(Counter(outcome.request.kind for outcome in outcomes))
        report.aborted = sum(outcome.aborted for outcome in outcomes)
        report.faults = [
            f"request {i} ({outcome.request.kind}): {reason}"
            for i, outcome in enumerate(outcomes)
            if (reason := fault(outcome))
        ]
        report.faults += silent
        for first in range(0, len(outcomes), SCORED_AT_ONCE):
            part = outcomes[first : first + SCORED_AT_ONCE]
            report.faults += self._judge_part(first, part)
        return report

    def _send(self, request: Request) -> Outcome | None:
        if time.monotonic() > self._deadline:
            return None
        outcome = Outcome(request)
        try:
            if request.body.get("stream"):
                _stream(self._server.url, request, outcome)
            else:
                answer = client.post(self._server.url, "/generate", request.body, _TIMEOUT)
                outcome.answers = answer if isinstance(answer, list) else [answer]
        except (client.RequestFailedError, OSError, http.client.HTTPException, ValueError) as error:
            outcome.error = f"{type(error).__name__}: {error}"
        with self._lock:
            self._done += 1
            if self._done % max(1, self._count // MEMORY_NOTES) == 0:
                self._note_memory()
        return outcome

    def _note_memory(self) -> None:
        processes = self._server.process.processes()
        memory = Memory(self._done, _gpu_bytes(processes), resident_bytes(processes))
        self._report.memory.append(memory)
        self._say(
            f"{self._server.variant.name}: {memory.done} requests, GPU"
            f" {memory.gpu / (1 << 20):.0f} MiB, processes {memory.resident / (1 << 20):.0f} MiB"
        )

    def _silent(self) -> list[str]:
        """SGLang checks its pools for leaks when it has nothing to do, and ends if one leaks."""
        time.sleep(2)
        try:
            client.generate(self._server.url, [[5, 6, 7]], 4)
        except client.RequestFailedError as error:
            tail = self._server.process.log_tail()
            return [f"the server does not answer any more: {error}\n{tail}"]
        return []

    def _judge_part(self, first: int, outcomes: Sequence[Outcome]) -> list[str]:
        """What the target finds wrong with outcomes, of which the first has that number."""
        work = [
            (i, outcome.request, answer["output_ids"])
            for i, outcome in enumerate(outcomes, first)
            for answer in outcome.answers
            if outcome.request.free and answer["output_ids"]
        ]
        if not work:
            return []
        pairs = [(request.body["input_ids"], ids) for _, request, ids in work]
        found = []
        for (number, request, _), scores in zip(
            work, scored(self._judge.url, pairs, top=TOP_K), strict=True
        ):
            self._report.scored_tokens += len(scores)
            rank = 1 if request.greedy else TOP_K
            behind = max(score.behind_rank(rank) for score in scores)
            if behind > self._bound:
                found.append(
                    f"request {number} ({request.kind}): a token is {behind:.3f} behind the"
                    f" target's rank {rank}"
                )
        return found


def _gpu_bytes(processes: Sequence[int]) -> int:
    held = gpu_bytes_by_process()
    if own := [held[process] for process in processes if process in held]:
        return sum(own)
    state = gpu_state()
    return state.used if state else 0


def write(reports: Sequence[SoakReport], out: Path) -> None:
    """``soak.json`` of all servers."""
    out.mkdir(parents=True, exist_ok=True)
    (out / REPORT).write_text(json.dumps([asdict(report) for report in reports], indent=1) + "\n")


def _stream(url: str, request: Request, outcome: Outcome) -> None:
    place = urlsplit(url)
    connection = http.client.HTTPConnection(place.hostname or "", place.port, timeout=_TIMEOUT)
    try:
        body = json.dumps(request.body)
        connection.request("POST", "/generate", body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        if answer.status != 200:
            raise ValueError(f"status {answer.status}: {answer.read().decode()[:500]}")
        last: dict[str, Any] | None = None
        for line in answer:
            text = line.decode().strip().removeprefix("data: ")
            if not text or text == "[DONE]":
                continue
            chunk: dict[str, Any] = json.loads(text)
            if "output_ids" not in chunk:
                raise ValueError(f"the stream says {text[:500]}")
            last = chunk
            outcome.chunks.append(chunk["output_ids"])
            if len(outcome.chunks) == request.abort_after:
                # The answer may be complete already; then there is nothing left to abort.
                outcome.aborted = chunk["meta_info"].get("finish_reason") is None
                if outcome.aborted:
                    return
        if last is None:
            raise ValueError("nothing in the stream")
        outcome.answers = [last]
    finally:
        connection.close()
