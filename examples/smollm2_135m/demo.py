"""Serve SmolLM2-135M-Instruct with FRSPEC and compare it with the other ways of serving it.

    python -m examples.smollm2_135m.demo

Starts SGLang's own server three times (on the GPU if there is one, else on the CPU engine): with
FRSPEC, with EAGLE over the full vocabulary, and without speculation. Exits with 1 if the texts
differ in float32, and with 2 if a server does not start. A GPU serves float16, whose texts can part
where two tokens are as likely but for rounding; they are shown.
"""

import argparse
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from examples.smollm2_135m import report
from examples.smollm2_135m.convert import CONVERSION
from examples.smollm2_135m.prompts import Prompt, chat_ids, eval_prompts
from examples.smollm2_135m.serving import (
    FULL_VOCABULARY,
    MODEL,
    NO_SPECULATION,
    TOKEN_MAP,
    Drafting,
    Reply,
    chat,
    first_difference,
    frspec,
    generate,
    hot_ids,
    served_dtype,
    serving,
    stream,
)
from sgl_frspec.server_process import ServerError, ServerProcess

MAP_SIZE = 16384
NEW_TOKENS = 64
# Held-out prompts, two a domain; the first two are streamed.
PROMPT_IDS = (2, 15, 4, 17, 30, 31, 45, 46)
STREAMED = 2


def main() -> int:
    """Run the demonstration and return its exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=MODEL, help=f"default: {MODEL}")
    model = parser.parse_args().model
    signal.signal(signal.SIGTERM, _exit)
    started = time.monotonic()
    report.heading("The model")
    made = CONVERSION.run(model)
    print(f"SmolLM2-135M-Instruct {'made in' if made else 'is in'} {model}")
    prompts = eval_prompts()
    chosen = [prompts[i] for i in PROMPT_IDS]
    try:
        replies = {
            drafting: answers(model, drafting, chosen)
            for drafting in (frspec(MAP_SIZE), FULL_VOCABULARY, NO_SPECULATION)
        }
    except ServerError as error:
        print(f"\nerror: {error}", file=sys.stderr)
        return 2
    report.heading("The same prompts, three ways")
    hot = hot_ids(MAP_SIZE)
    print(report.table({drafting.title: r for drafting, r in replies.items()}, hot))
    differences = compare(replies)
    for line in differences:
        print(line, file=sys.stderr)
    report.heading("Talk to it yourself")
    print(report.how_to_talk(model, TOKEN_MAP, MAP_SIZE))
    print(f"\n{time.monotonic() - started:.0f} s in all.")
    return 1 if differences and served_dtype() == "float32" else 0


def answers(model: Path, drafting: Drafting, prompts: Sequence[Prompt]) -> list[Reply]:
    """Start a server, let it answer, stop it. FRSPEC shows its first answers as they come."""
    report.heading(drafting.title)
    tokenizer = load_tokenizer(model)
    ids = [chat_ids(tokenizer, prompt.text) for prompt in prompts]
    log = model.parent / "logs" / f"{drafting.title.split(',')[0].replace(' ', '-').lower()}.log"
    progress = report.Progress(f"starting the server (log: {log})")
    with serving(model, drafting, log, progress.update) as server:
        progress.done(f"the server is ready after {server.seconds:.0f} s")
        shown = STREAMED if drafting.map_size else 0
        replies = [show(server, prompts[i], ids[i]) for i in range(shown)]
        if shown:
            check_chat_endpoint(server, prompts[0], replies[0])
        begun = time.monotonic()
        print(f"answering {len(ids) - shown} prompts at once ...", flush=True)
        replies += generate(server.url, ids[shown:], NEW_TOKENS)
        print(f"done after {time.monotonic() - begun:.0f} s")
    return replies


def show(server: ServerProcess, prompt: Prompt, ids: list[int]) -> Reply:
    """Print one answer while it grows, one mark a cycle."""
    print(f"\n> {prompt.text}")
    writer = report.CycleWriter(sys.stdout)
    reply = None
    for reply in stream(server.url, ids, NEW_TOKENS):
        writer.write(reply.text)
    if reply is None:
        raise ServerError(f"{server.url} streamed nothing:\n{server.log_tail()}")
    writer.end(reply)
    return reply


def check_chat_endpoint(server: ServerProcess, prompt: Prompt, reply: Reply) -> None:
    """The OpenAI-compatible endpoint must say the same."""
    text = chat(server.url, prompt.text, NEW_TOKENS)
    if text.strip() != reply.text.strip():
        raise ServerError(f"/v1/chat/completions answers {text!r}, /generate {reply.text!r}")
    print("POST /v1/chat/completions gives the same text.\n")


def compare(replies: dict[Drafting, list[Reply]]) -> list[str]:
    """One line for each answer that differs from the one without speculation."""
    lines = []
    for drafting, answered in replies.items():
        for number, (reply, plain) in enumerate(
            zip(answered, replies[NO_SPECULATION], strict=True)
        ):
            at = first_difference(reply.ids, plain.ids)
            if at is not None:
                lines.append(
                    f"DIFFERENT: {drafting.title}, prompt {number + 1}, from token {at}: "
                    f"{reply.ids[at : at + 3]} instead of {plain.ids[at : at + 3]}"
                )
    return lines


def load_tokenizer(model: Path) -> Any:
    """The model's tokenizer, from its folder."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model)


def _exit(signum: int, frame: object) -> NoReturn:
    # As an exception, so that a running server is stopped on the way out.
    raise SystemExit(128 + signum)


if __name__ == "__main__":
    sys.exit(main())
