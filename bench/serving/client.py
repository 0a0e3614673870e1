"""Requests to a server's HTTP endpoints."""

import http.client
import json
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

REQUEST_SECONDS = 600.0


class RequestFailedError(RuntimeError):
    """The server refused a request or went away; the message says what it answered."""


@dataclass(frozen=True)
class Answer:
    """One answer of ``/generate``.

    Attributes:
        ids: generated tokens.
        cycles: verifications of the target; 0 without speculation.
        accepted: draft tokens that these accepted.
        raw: the whole answer.
    """

    ids: list[int]
    cycles: int
    accepted: int
    raw: dict[str, Any]

    @classmethod
    def of(cls, raw: dict[str, Any]) -> "Answer":
        """From the parsed JSON of one answer."""
        meta = raw["meta_info"]
        cycles = meta.get("spec_verify_ct") or 0
        accepted = meta.get("spec_num_correct_drafts")
        if accepted is None:
            accepted = max(0, meta["completion_tokens"] - 1 - cycles) if cycles else 0
        return cls(raw["output_ids"], cycles, accepted, raw)


def get(url: str, path: str, timeout: float = 60.0) -> Any:
    """The JSON at ``path``."""
    return _open(urllib.request.Request(f"{url}{path}"), timeout)


def post(url: str, path: str, body: Any, timeout: float = REQUEST_SECONDS) -> Any:
    """The JSON answer to ``body``; text that is no JSON comes back as it is."""
    data, headers = json.dumps(body).encode(), {"Content-Type": "application/json"}
    return _open(urllib.request.Request(f"{url}{path}", data, headers), timeout)


def generate(
    url: str, prompts: Sequence[Sequence[int]], new_tokens: int, **request: Any
) -> list[Answer]:
    """Greedy answers of exactly ``new_tokens`` tokens to a batch of tokenised prompts.

    Args:
        url: of the server.
        prompts: token ids.
        new_tokens: generated for each; no token ends an answer before.
        request: further fields of the request.
    """
    sampling = {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True}
    body = {"input_ids": [list(prompt) for prompt in prompts], "sampling_params": sampling}
    return [Answer.of(raw) for raw in post(url, "/generate", body | request)]


def stream(
    url: str, prompts: Sequence[Sequence[int]], **sampling: Any
) -> list[tuple[float, dict[str, Any]]]:
    """Greedy answers to a batch, in parts: when each arrived, in seconds, and what it says.

    Args:
        url: of the server.
        prompts: token ids.
        sampling: further parameters; ``stream_interval`` is how many tokens lie between two parts.

    Raises:
        RequestFailedError: the server refused the request or went away.
    """
    body = {"input_ids": [list(prompt) for prompt in prompts], "stream": True}
    body["sampling_params"] = {"temperature": 0, "ignore_eos": True} | sampling
    place = urlsplit(url)
    connection = http.client.HTTPConnection(
        place.hostname or "", place.port, timeout=REQUEST_SECONDS
    )
    arrived: list[tuple[float, bytes]] = []
    try:
        headers = {"Content-Type": "application/json"}
        connection.request("POST", f"{place.path}/generate", json.dumps(body), headers)
        answer = connection.getresponse()
        if answer.status != 200:
            raise RequestFailedError(f"{url}: {answer.status}: {answer.read()[:2000]!r}")
        # Parsed when all have come: a part may be long, and the next one must not wait for it.
        arrived = [(time.perf_counter(), line) for line in answer]
    except (OSError, http.client.HTTPException) as error:
        raise RequestFailedError(f"{url}: {error}") from error
    finally:
        connection.close()
    lines = [(seconds, line.removeprefix(b"data: ").strip()) for seconds, line in arrived]
    parts = [(seconds, json.loads(line)) for seconds, line in lines if line and line != b"[DONE]"]
    for _, part in parts:
        if "meta_info" not in part:
            raise RequestFailedError(f"{url}: the stream says {part}")
    return parts


def _open(request: urllib.request.Request, timeout: float) -> Any:
    try:
        with urllib.request.urlopen(request, timeout=timeout) as answer:
            text = answer.read().decode()
    except urllib.error.HTTPError as error:
        text = error.read().decode(errors="replace")
        raise RequestFailedError(f"{request.full_url}: {error.code}: {text[:2000]}") from None
    except OSError as error:
        raise RequestFailedError(f"{request.full_url}: {error}") from error
    try:
        return json.loads(text)
    except ValueError:
        return text
