"""Accept lengths on the held-out prompts, in SGLang's own engine; the figures of the model card.

    python -m examples.smollm2_135m.accept_table

Serves the target without speculation, with EAGLE over the full vocabulary and with FRSPEC at two
map sizes; 128 greedy tokens for each prompt, float32, or float16 on a GPU. Writes accept_table.json
and accept_table.md to --out. Every answered batch is kept there, so that an interrupted run goes on
where it was. Exits with 1 if a reply in float32 differs from the one without speculation.
"""

import argparse
import hashlib
import json
import signal
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from examples.gguf.conversion import RECORD
from examples.smollm2_135m import report
from examples.smollm2_135m.accept_summary import Answers, markdown, summarise
from examples.smollm2_135m.convert import CONVERSION
from examples.smollm2_135m.demo import load_tokenizer
from examples.smollm2_135m.prompts import Prompt, chat_ids, eval_prompts
from examples.smollm2_135m.serving import (
    DRAFT,
    DRAFT_TOKENS,
    FULL_VOCABULARY,
    MODEL,
    NO_SPECULATION,
    STEPS,
    TOKEN_MAP,
    TOP_K,
    Drafting,
    Reply,
    accept_length,
    frspec,
    generate,
    served_dtype,
    serving,
)
from sgl_frspec.maps.files import atomic_file
from sgl_frspec.server_process import ServerError

NEW_TOKENS = 128
MAP_SIZES = (16384, 32768)
OUT = Path(".cache/smollm2-135m-accept")
DRAFTINGS = (NO_SPECULATION, FULL_VOCABULARY, *map(frspec, MAP_SIZES))


class Store:
    """Answered batches on disk, valid for one state of the model, the draft and the map."""

    def __init__(self, folder: Path, state: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._state = state

    def batch(self, key: str, answer: Callable[[], list[Reply]]) -> list[Reply]:
        """The replies kept under ``key``, or those of ``answer``, kept from now on."""
        path = self._folder / f"{key}.json"
        if path.is_file():
            kept = json.loads(path.read_text(encoding="utf-8"))
            if kept["state"] == self._state:
                return [Reply(**reply) for reply in kept["replies"]]
        replies = answer()
        content = {"state": self._state, "replies": [asdict(reply) for reply in replies]}
        with atomic_file(path) as file:
            file.write(json.dumps(content).encode())
        return replies


def main() -> int:
    """Run the command and return its exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=MODEL, help=f"default: {MODEL}")
    parser.add_argument("--out", type=Path, default=OUT, help=f"default: {OUT}")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    CONVERSION.run(args.model)
    prompts = eval_prompts()
    try:
        answers = collect(args.model, args.out, prompts)
    except ServerError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    settings = {"steps": STEPS, "top_k": TOP_K, "draft_tokens": DRAFT_TOKENS}
    settings |= {"new_tokens": NEW_TOKENS, "dtype": served_dtype()}
    summary = {"settings": settings, **summarise(answers, DRAFTINGS[1:], FULL_VOCABULARY)}
    (args.out / "accept_table.json").write_text(json.dumps(summary, indent=1), encoding="utf-8")
    (args.out / "accept_table.md").write_text(markdown(summary), encoding="utf-8")
    print(f"\n{markdown(summary)}\n{args.out}/accept_table.json")
    return 1 if summary["differences"] and served_dtype() == "float32" else 0


def collect(model: Path, out: Path, prompts: list[Prompt]) -> Answers:
    """Let every server answer, domain by domain."""
    tokenizer = load_tokenizer(model)
    ids = [chat_ids(tokenizer, prompt.text) for prompt in prompts]
    files = [model / RECORD, DRAFT / "model.safetensors"]
    batches = out / f"batches-{served_dtype()}"
    store = Store(batches, fingerprint(files, ids))
    mapped = Store(batches, fingerprint([*files, TOKEN_MAP], ids))
    replies = {}
    for drafting in DRAFTINGS:
        report.heading(drafting.title)
        kept = mapped if drafting.map_size else store
        replies[drafting.title] = _answers(model, out, drafting, prompts, ids, kept)
    return Answers(prompts, replies, NO_SPECULATION.title)


def _answers(
    model: Path,
    out: Path,
    drafting: Drafting,
    prompts: Sequence[Prompt],
    ids: Sequence[list[int]],
    store: Store,
) -> list[Reply]:
    name = drafting.title.replace(",", "").replace(" ", "-").lower()
    replies: dict[int, Reply] = {}
    with _LazyServer(model, drafting, out / f"{name}.log") as server:
        for domain in dict.fromkeys(prompt.domain for prompt in prompts):
            numbers = [i for i, prompt in enumerate(prompts) if prompt.domain == domain]
            batch = [ids[i] for i in numbers]
            answered = store.batch(f"{name}-{domain}", lambda batch=batch: server.answer(batch))
            print(f"{domain}: {len(answered)} replies, {_length(answered)}", flush=True)
            replies |= dict(zip(numbers, answered, strict=True))
    return [replies[i] for i in range(len(prompts))]


class _LazyServer:
    """Starts when the first batch needs it: a run that finds everything kept starts nothing."""

    def __init__(self, model: Path, drafting: Drafting, log: Path) -> None:
        self._context = serving(model, drafting, log, report.Progress("the server").update)
        self._url: str | None = None

    def answer(self, batch: Sequence[list[int]]) -> list[Reply]:
        """Greedy replies to ``batch``."""
        if self._url is None:
            self._url = self._context.__enter__().url
        return generate(self._url, batch, NEW_TOKENS)

    def __enter__(self) -> "_LazyServer":
        return self

    def __exit__(self, *exception: Any) -> None:
        if self._url is not None:
            self._context.__exit__(*exception)


def fingerprint(files: Iterable[Path], ids: Sequence[list[int]]) -> str:
    """What the replies depend on."""
    digest = hashlib.sha256(json.dumps([list(ids), STEPS, TOP_K, DRAFT_TOKENS]).encode())
    for file in files:
        digest.update(file.read_bytes())
    return digest.hexdigest()


def _length(replies: Sequence[Reply]) -> str:
    length = accept_length(replies)
    return f"{length:.2f} tokens per cycle" if length else "one token at a time"


if __name__ == "__main__":
    sys.exit(main())
