"""Sampled replies of one way to serve the target, kept for ``sampled_compare``.

    python -m examples.smollm2_135m.sampled_arm --arm drawn --requests 20000 --out FOLDER

Serves the target without speculation (``plain``), or with FRSPEC whose drafted tokens are ``fixed``
or ``drawn`` (docs/sampling.md), in trees or chains, and asks for

- the first three tokens of ``--requests`` replies for each setting: temperature 0.7, 1.0, and 1.0
  with top-p 0.9, four held-out prompts, all kinds in the same batches;
- ``--replies`` whole replies to held-out prompts at temperature 1, for the accept length;
- ``--seeds`` seeded replies and the log probabilities of ``--greedy`` greedy ones, in batches of
  16 and again in other company and alone (``sampled_repeats``).

The outcome is written to the folder after every batch. ``sampled_compare FOLDER`` judges it.
Several servers can share an arm's requests: give each a ``--name`` and a ``--random-seed``.
"""

import argparse
import json
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from examples.smollm2_135m.convert import CONVERSION
from examples.smollm2_135m.demo import load_tokenizer
from examples.smollm2_135m.prompts import chat_ids, eval_prompts
from examples.smollm2_135m.sampled_repeats import (
    repeated_log_probabilities,
    repeated_seeds,
)
from examples.smollm2_135m.serving import DRAFT, MODEL, TOKEN_MAP, free_port, sample
from sgl_frspec.maps.files import atomic_file
from sgl_frspec.serve import server_command
from sgl_frspec.server_process import ServerError, ServerProcess

SETTINGS: dict[str, dict[str, Any]] = {
    "T 0.7": {"temperature": 0.7},
    "T 1.0": {"temperature": 1.0},
    "top-p 0.9": {"temperature": 1.0, "top_p": 0.9},
}
FIRST_TOKENS = 3
PROMPTS = 4
LONGEST_CONTEXT = 64
TREE = ("4", "4", "16")
CHAIN = ("4", "1", "5")
ARMS = {
    "plain": None, "fixed": TREE, "drawn": TREE, "fixed-chain": CHAIN, "drawn-chain": CHAIN,
}  # fmt: skip
KINDS_EACH = 100  # replies of a kind in one request to the server
REPLIES_EACH = 256  # whole replies likewise
REPLY_TOKENS = 64
MAP_SIZE = 32768


def drafting_flags(arm: str, map_size: int) -> list[str]:
    """SGLang's flags for one of ``ARMS``."""
    tree = ARMS[arm]
    if tree is None:
        return []
    steps, top_k, nodes = tree
    flags = [
        *("--speculative-algorithm", "FRSPEC", "--speculative-draft-model-path", str(DRAFT)),
        *("--speculative-token-map", str(TOKEN_MAP), "--frspec-map-size", str(map_size)),
        *("--speculative-num-steps", steps, "--speculative-eagle-topk", top_k),
        *("--speculative-num-draft-tokens", nodes),
    ]
    return [*flags, *(["--speculative-use-rejection-sampling"] if arm.startswith("drawn") else [])]


class Outcome:
    """What a server answered so far, on disk after every batch."""

    def __init__(self, path: Path, arm: str, map_size: int, random_seed: int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self.found: dict[str, Any] = {
            "arm": arm, "map_size": map_size, "random_seed": random_seed, "counts": {},
        }  # fmt: skip

    def write(self) -> None:
        """Replace the file."""
        with atomic_file(self._path) as file:
            file.write(json.dumps(self.found).encode())


def ask_first_tokens(url: str, prompts: list[list[int]], requests: int, outcome: Outcome) -> None:
    """Count the first tokens of at least ``requests`` replies for each setting."""
    kinds = [(name, place) for name in SETTINGS for place in range(PROMPTS)]
    counts = {kind: Counter[str]() for kind in kinds}
    common = {"max_new_tokens": FIRST_TOKENS, "ignore_eos": True}
    for start in range(0, requests, PROMPTS * KINDS_EACH):
        asked = kinds * min(KINDS_EACH, -(-(requests - start) // PROMPTS))
        replies = sample(
            url,
            [prompts[place] for _, place in asked],
            [SETTINGS[name] | common for name, _ in asked],
        )
        for kind, reply in zip(asked, replies, strict=True):
            counts[kind][",".join(map(str, reply.ids))] += 1
        outcome.found["counts"] = {
            name: [dict(counts[name, place]) for place in range(PROMPTS)] for name in SETTINGS
        }
        outcome.write()


def ask_replies(url: str, prompts: list[list[int]], replies: int, outcome: Outcome) -> None:
    """Cycles and accepted drafts of sampled replies."""
    common = {"temperature": 1.0, "max_new_tokens": REPLY_TOKENS}
    found = outcome.found["replies"] = []
    for start in range(0, replies, REPLIES_EACH):
        numbers = range(start, min(start + REPLIES_EACH, replies))
        asked = [prompts[i % len(prompts)] for i in numbers]
        got = sample(url, asked, [common | {"sampling_seed": i} for i in numbers])
        found += [(reply.cycles, reply.accepted, len(reply.ids)) for reply in got]
        outcome.write()


def short_prompts(model: Path) -> list[list[int]]:
    """Held-out prompts as token ids, short ones only."""
    tokenizer = load_tokenizer(model)
    ids = [chat_ids(tokenizer, prompt.text) for prompt in eval_prompts()]
    return [prompt for prompt in ids if len(prompt) <= LONGEST_CONTEXT]


def main() -> int:
    """Run the command and return its exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=MODEL, help=f"default: {MODEL}")
    parser.add_argument("--arm", choices=list(ARMS), required=True)
    parser.add_argument("--map-size", type=int, default=MAP_SIZE)
    parser.add_argument("--requests", type=int, default=0, help="for each setting")
    parser.add_argument("--replies", type=int, default=0)
    parser.add_argument("--seeds", type=int, default=0)
    parser.add_argument("--greedy", type=int, default=0)
    parser.add_argument("--random-seed", type=int, default=1, help="of the server; default: 1")
    parser.add_argument("--name", help="of the files; default: the arm and the map's size")
    parser.add_argument("--flags", default="", help="more flags for the server")
    parser.add_argument("--start-seconds", type=float, default=240.0)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    # The server goes with this process, however it is ended.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    CONVERSION.run(args.model)
    prompts, port = short_prompts(args.model), free_port()
    flags = [
        *("--model-path", str(args.model), "--port", str(port)),
        *("--random-seed", str(args.random_seed)),
        *("--sampling-backend", "pytorch", *drafting_flags(args.arm, args.map_size)),
        *args.flags.split(),
    ]
    name = args.name or f"{args.arm}-{args.map_size}"
    outcome = Outcome(args.out / f"{name}.json", args.arm, args.map_size, args.random_seed)
    log = args.out / f"{name}.log"
    started = time.perf_counter()
    try:
        with ServerProcess(server_command(flags), f"http://127.0.0.1:{port}", log) as server:
            server.wait_until_ready(args.start_seconds)
            _say(args, started, ["ready"])
            if args.requests:
                ask_first_tokens(server.url, prompts[:PROMPTS], args.requests, outcome)
                _say(args, started, ["first tokens", args.requests])
            if args.replies:
                ask_replies(server.url, prompts, args.replies, outcome)
                _say(args, started, ["replies", args.replies])
            for key, count, repeated in (
                ("seeds", args.seeds, repeated_seeds),
                ("greedy", args.greedy, repeated_log_probabilities),
            ):
                if count:
                    outcome.found[key] = repeated(server.url, prompts, count)
                    outcome.write()
                    _say(args, started, [key, outcome.found[key]])
    except ServerError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _say(args: argparse.Namespace, started: float, words: Iterable[Any]) -> None:
    print(
        f"[{time.perf_counter() - started:5.1f} s] {args.name or args.arm} {args.map_size}:",
        *words,
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main())
