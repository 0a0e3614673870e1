"""Time the rounds of running servers, which take turns, inside streamed answers.

A request's whole time holds its prefill and its way through the server's processes, tens of
milliseconds that differ from one request to the next: over the 40 rounds of an answer they hide
what a vocabulary costs. The server says with each part of a streamed answer how many rounds it has
run, so the time between two parts is that of known rounds and of nothing else. Parts are sent every
``STREAM_INTERVAL`` tokens, not every round: sending costs the server's host time.
"""

import http.client
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from bench.serving import client
from bench.serving.client import Answer
from bench.serving.measure import in_turns
from bench.serving.prompts import Prompts, Workload
from bench.serving.servers import Say, Server

STREAM_INTERVAL = 8  # tokens
NEW_TOKENS = 256
TURNS = 8
_TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Stretch:
    """Rounds of one streamed batch.

    Attributes:
        us: between its first part that counts a round and its end.
        rounds: in that time.
        accept_length: tokens a round of the whole answer, the target's own one included.
        wrong: wrong answers; None where right ones are not known.
    """

    us: float
    rounds: int
    accept_length: float
    wrong: int | None

    @property
    def us_per_round(self) -> float:
        """Microseconds of one round."""
        return self.us / self.rounds


def time_in_turns(
    servers: Sequence[Server], workload: Workload, prompts: Prompts, say: Say
) -> dict[str, list[Stretch]]:
    """``TURNS`` stretches by variant name: A B C, C B A, …, so that drift falls on all alike.

    A turn before them, which fills the prefix cache, does not count. A server that fails is left
    out from then on; wrong answers are said.
    """
    texts = prompts.of(workload)
    found: dict[str, list[Stretch]] = {server.variant.name: [] for server in servers}

    def stretch_of(server: Server) -> Stretch:
        return _stretch(server.url, texts, workload, prompts)

    for turn, name, stretch in in_turns(servers, TURNS, stretch_of, say):
        if stretch.wrong:
            say(f"{name}: {stretch.wrong} of {workload.batch} answers WRONG")
        if turn:
            found[name].append(stretch)
    return found


def _stretch(
    url: str, texts: Sequence[Sequence[int]], workload: Workload, prompts: Prompts
) -> Stretch:
    begins: float | None = None
    before, ends = 0, 0.0
    answers: dict[int, Answer] = {}
    for arrived, part in _parts(url, texts):
        place = part.get("index", 0)
        answers[place] = answer = Answer.of(part)
        # All requests of a batch are in the same rounds; the first one's parts tell how many.
        if place == 0:
            ends = arrived
            if begins is None and answer.cycles:
                begins, before = arrived, answer.cycles
    first = answers.get(0)
    if begins is None or first is None or first.cycles <= before:
        raise client.RequestFailedError(f"{url}: no two parts of the answer count rounds")
    return Stretch(
        us=1e6 * (ends - begins),
        rounds=first.cycles - before,
        accept_length=(len(first.ids) - 1) / first.cycles,
        wrong=prompts.wrong(workload, [answers[place] for place in sorted(answers)]),
    )


def _parts(url: str, texts: Sequence[Sequence[int]]) -> list[tuple[float, dict[str, Any]]]:
    """When each part of the answer arrived, in seconds, and what it says.

    Raises:
        RequestFailedError: the server refused the request or went away.
    """
    sampling = {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}
    sampling["stream_interval"] = STREAM_INTERVAL
    body = {"input_ids": [list(text) for text in texts], "sampling_params": sampling}
    place = urlsplit(url)
    connection = http.client.HTTPConnection(place.hostname or "", place.port, timeout=_TIMEOUT_S)
    arrived: list[tuple[float, bytes]] = []
    try:
        connection.request(
            "POST",
            f"{place.path}/generate",
            json.dumps(body | {"stream": True}),
            {"Content-Type": "application/json"},
        )
        answer = connection.getresponse()
        if answer.status != 200:
            raise client.RequestFailedError(f"{url}: {answer.status}: {answer.read()[:2000]!r}")
        # Parsed when all have come: a part may be long, and the next one must not wait for it.
        arrived = [(time.perf_counter(), line) for line in answer]
    except (OSError, http.client.HTTPException) as error:
        raise client.RequestFailedError(f"{url}: {error}") from error
    finally:
        connection.close()
    lines = [(seconds, line.removeprefix(b"data: ").strip()) for seconds, line in arrived]
    parts = [(seconds, json.loads(line)) for seconds, line in lines if line and line != b"[DONE]"]
    for _, part in parts:
        if "meta_info" not in part:
            raise client.RequestFailedError(f"{url}: the stream says {part}")
    return parts
