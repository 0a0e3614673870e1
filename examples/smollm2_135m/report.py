"""What the demonstration prints."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from bench.columns import aligned
from examples.smollm2_135m.serving import Reply, accept_length, first_difference, outside_share

_COLOURS = ("\033[36m", "\033[33m")
_RESET = "\033[0m"
_HEARTBEAT_SECONDS = 10.0


def heading(text: str) -> None:
    """A section's title."""
    print(f"\n== {text} ==", flush=True)


class Progress:
    """A line that shows the seconds passed: in place on a terminal, else one every 10 seconds."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._shown = 0.0
        self._in_place = sys.stdout.isatty()
        print(f"{what} ...", end="" if self._in_place else "\n", flush=True)

    def update(self, seconds: float, log_line: str) -> None:
        """Show that time passes; the log's last line is left to the log."""
        if self._in_place:
            print(f"\r{self._what} ... {seconds:.0f} s", end="", flush=True)
        elif seconds - self._shown >= _HEARTBEAT_SECONDS:
            self._shown = seconds
            print(f"  {seconds:.0f} s", flush=True)

    def done(self, result: str) -> None:
        """End the line."""
        print(f"\r\033[K{result}" if self._in_place else result, flush=True)


class CycleWriter:
    """Writes a growing text so that each cycle's share shows: by colour, or ``|`` in a file."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._colours = out.isatty()
        self._written = ""
        self._cycles = 0

    def write(self, text: str) -> None:
        """Add what ``text`` has beyond the text before."""
        new = text[len(self._written) :]
        if not new:
            return
        if self._colours:
            new = f"{_COLOURS[self._cycles % 2]}{new}{_RESET}"
        elif self._cycles:
            new = f"|{new}"
        print(new, end="", flush=True, file=self._out)
        self._written, self._cycles = text, self._cycles + 1

    def end(self, reply: Reply) -> None:
        """Say what the text took."""
        mark = "one colour" if self._colours else "one section between bars"
        print(
            f"\n  [{len(reply.ids)} tokens in {reply.cycles} cycles, {mark} each: "
            f"{accept_length([reply]):.2f} tokens per cycle]",
            file=self._out,
            flush=True,
        )


def table(replies: dict[str, Sequence[Reply]], hot: set[int]) -> str:
    """Accept length, share of tokens outside the map, and equality with the last entry."""
    plain = [reply.ids for reply in list(replies.values())[-1]]
    rows = [("", "tokens per cycle", "cycles", "tokens", "outside the map", "same text")]
    for title, answered in replies.items():
        length = accept_length(answered)
        same = all(
            first_difference(reply.ids, ids) is None
            for reply, ids in zip(answered, plain, strict=True)
        )
        rows.append(
            (
                title,
                f"{length:.2f}" if length else "1",
                str(sum(reply.cycles or len(reply.ids) for reply in answered)),
                str(sum(len(reply.ids) for reply in answered)),
                f"{outside_share(answered, hot):.1%}",
                "yes" if same else "NO",
            )
        )
    return "\n".join([*aligned(rows), _EXPLANATION])


_EXPLANATION = """
tokens per cycle: accepted draft tokens + 1, per verification by the target
outside the map:  share of the generated tokens that FRSPEC's draft cannot propose"""


def how_to_talk(model: Path, token_map: Path, map_size: int) -> str:
    """Commands for a server of one's own."""
    folder = _relative(token_map.parent)
    python = _relative(Path(sys.executable).parent)
    return f"""\
Start a server:

  {python}/frspec serve --model-path {model} --port 30000 \\
    --speculative-algorithm FRSPEC --speculative-draft-model-path {folder}/draft \\
    --speculative-token-map {folder}/{token_map.name} --frspec-map-size {map_size} \\
    --speculative-num-steps 4 --speculative-eagle-topk 4 --speculative-num-draft-tokens 16

curl:

  curl http://127.0.0.1:30000/v1/chat/completions -H 'Content-Type: application/json' -d '{{
    "model": "default", "max_tokens": 64, "temperature": 0,
    "messages": [{{"role": "user", "content": "Why does the moon change its shape?"}}]}}'

The openai package, in {python}/python:

  from openai import OpenAI
  client = OpenAI(base_url="http://127.0.0.1:30000/v1", api_key="none")
  question = [{{"role": "user", "content": "Why does the moon change its shape?"}}]
  for part in client.chat.completions.create(
      model="default", messages=question, max_tokens=64, temperature=0, stream=True):
      print(part.choices[0].delta.content or "", end="", flush=True)"""


def _relative(path: Path) -> Path:
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
