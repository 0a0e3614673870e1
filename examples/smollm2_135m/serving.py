"""The example's server, drafting in one of several ways, and what it answers."""

import json
import socket
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sgl_frspec.maps import fit_token_map, load_token_map
from sgl_frspec.serve import server_command
from sgl_frspec.server_process import ServerProcess

FOLDER = Path(__file__).parent
DRAFT = FOLDER / "draft"
TOKEN_MAP = FOLDER / "token_map.safetensors"
MODEL = Path(".cache/smollm2-135m")
STEPS, TOP_K, DRAFT_TOKENS = 4, 4, 16
START_SECONDS = 240.0
_REQUEST_SECONDS = 1800.0


@dataclass(frozen=True)
class Drafting:
    """A way to serve the target.

    Attributes:
        title: what tables call it.
        flags: SGLang's flags for it.
        map_size: how many ids the draft proposes; None for all, or where there is no draft.
    """

    title: str
    flags: tuple[str, ...] = ()
    map_size: int | None = None


_EAGLE = (
    *("--speculative-draft-model-path", str(DRAFT)),
    *("--speculative-num-steps", str(STEPS)),
    *("--speculative-eagle-topk", str(TOP_K)),
    *("--speculative-num-draft-tokens", str(DRAFT_TOKENS)),
)
NO_SPECULATION = Drafting("no speculation")
FULL_VOCABULARY = Drafting("EAGLE, full vocabulary", ("--speculative-algorithm", "EAGLE", *_EAGLE))


def frspec(size: int) -> Drafting:
    """FRSPEC over the map's ``size`` best ranked ids."""
    flags = (
        *("--speculative-algorithm", "FRSPEC"),
        *("--speculative-token-map", str(TOKEN_MAP)),
        *("--frspec-map-size", str(size)),
        *_EAGLE,
    )
    return Drafting(f"FRSPEC, {size:,} ids", flags, size)


def served_dtype() -> str:
    """float32, so that texts can be compared token by token; float16 on a GPU.

    SGLang's RMSNorm kernel takes no float32 there. Texts then part where two tokens are as likely
    but for rounding.
    """
    return "float16" if server_command(()).device == "gpu" else "float32"


def server_flags(model: Path, drafting: Drafting, port: int, dtype: str) -> list[str]:
    """All flags after ``frspec serve``."""
    return [
        *("--model-path", str(model), *drafting.flags),
        *("--port", str(port), "--dtype", dtype, "--context-length", "2048"),
        *("--max-running-requests", "16"),
    ]


@contextmanager
def serving(
    model: Path,
    drafting: Drafting,
    log: Path,
    on_progress: Callable[[float, str], None] | None = None,
) -> Iterator[ServerProcess]:
    """A server that is ready; it is gone when the block ends.

    Raises:
        ServerError: it did not start; the message holds the end of its log.
    """
    port = free_port()
    flags = server_flags(model, drafting, port, served_dtype())
    command = server_command(flags)
    if command.device == "gpu":
        command = server_command(
            [*flags, "--attention-backend", "triton", "--mem-fraction-static", "0.3"], gpu=True
        )
    log.parent.mkdir(parents=True, exist_ok=True)
    with ServerProcess(command, f"http://127.0.0.1:{port}", log) as server:
        server.wait_until_ready(START_SECONDS, on_progress)
        yield server


@dataclass(frozen=True)
class Reply:
    """One answer.

    Attributes:
        ids, text: what the server generated; the end-of-turn token is the last of ``ids``.
        cycles: verifications of the target, 0 without speculation.
        accepted: draft tokens that these accepted.
    """

    ids: list[int]
    text: str
    cycles: int
    accepted: int

    @classmethod
    def of(cls, answer: dict[str, Any]) -> "Reply":
        """From an answer of SGLang's ``/generate``."""
        meta = answer["meta_info"]
        return cls(
            answer["output_ids"],
            answer["text"],
            meta.get("spec_verify_ct", 0),
            meta.get("spec_num_correct_drafts", 0),
        )


def generate(url: str, prompts: Sequence[list[int]], new_tokens: int) -> list[Reply]:
    """Greedy answers to a batch of tokenised prompts."""
    body = _body(list(prompts), new_tokens)
    with _post(f"{url}/generate", body) as answer:
        return [Reply.of(one) for one in json.load(answer)]


def sample(
    url: str, prompts: Sequence[list[int]], samplings: Sequence[dict[str, Any]]
) -> list[Reply]:
    """Answers to tokenised prompts, each with SGLang's sampling parameters of its own."""
    body = {"input_ids": list(prompts), "sampling_params": list(samplings)}
    with _post(f"{url}/generate", body) as answer:
        return [Reply.of(one) for one in json.load(answer)]


def log_probabilities(
    url: str, prompts: Sequence[list[int]], new_tokens: int
) -> list[list[tuple[int, float]]]:
    """Greedy answers to tokenised prompts: each token and its log probability."""
    body = _body(list(prompts), new_tokens) | {"return_logprob": True}
    with _post(f"{url}/generate", body) as answer:
        scored = [one["meta_info"]["output_token_logprobs"] for one in json.load(answer)]
    return [[(token, value) for value, token, *_ in one] for one in scored]


def stream(url: str, prompt: list[int], new_tokens: int) -> Iterator[Reply]:
    """The greedy answer to one prompt, growing: what is there so far, after each cycle."""
    body = _body(prompt, new_tokens) | {"stream": True}
    with _post(f"{url}/generate", body) as answer:
        for line in answer:
            event = line.decode().strip().removeprefix("data: ")
            if event and event != "[DONE]":
                yield Reply.of(json.loads(event))


def chat(url: str, message: str, new_tokens: int) -> str:
    """The greedy answer of the OpenAI-compatible endpoint."""
    body = {
        "model": "default",
        "messages": [{"role": "user", "content": message}],
        "max_tokens": new_tokens,
        "temperature": 0,
    }
    with _post(f"{url}/v1/chat/completions", body) as answer:
        return json.load(answer)["choices"][0]["message"]["content"]


def accept_length(replies: Sequence[Reply]) -> float | None:
    """Mean tokens per cycle, accepted drafts + 1, over all cycles; None without speculation."""
    cycles = sum(reply.cycles for reply in replies)
    return 1 + sum(reply.accepted for reply in replies) / cycles if cycles else None


def hot_ids(size: int) -> set[int]:
    """The ids that FRSPEC proposes at this map size."""
    token_map = load_token_map(TOKEN_MAP)
    vocabulary = token_map.metadata.vocab_size
    if vocabulary is None:
        raise ValueError(f"{TOKEN_MAP} does not say its vocabulary size; rank it again")
    return set(fit_token_map(token_map, vocab_size=vocabulary, size=size).ids.tolist())


def outside_share(replies: Sequence[Reply], hot: set[int]) -> float:
    """Share of the generated tokens that a draft over ``hot`` could not propose."""
    tokens = [token for reply in replies for token in reply.ids]
    return sum(token not in hot for token in tokens) / len(tokens)


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    """Index of the first token that differs; None for equal lists."""
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return i
    return None if len(a) == len(b) else min(len(a), len(b))


def free_port() -> int:
    """A port that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _body(input_ids: Any, new_tokens: int) -> dict[str, Any]:
    sampling = {"temperature": 0, "max_new_tokens": new_tokens}
    return {"input_ids": input_ids, "sampling_params": sampling}


def _post(url: str, body: dict[str, Any]) -> Any:
    request = urllib.request.Request(
        url, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    return urllib.request.urlopen(request, timeout=_REQUEST_SECONDS)
