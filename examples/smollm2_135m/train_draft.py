"""Make the draft again, on a machine with a GPU.

    python -m examples.smollm2_135m.convert --out .cache/smollm2-135m
    python -m examples.smollm2_135m.train_draft --model .cache/smollm2-135m --out build/draft

Stages: the target writes prompts, then replies; the draft is trained on the replies; its accept
length is measured on the held-out prompts. Each stage leaves its result in ``--work`` (default: the
output folder), and a second call goes on from there.
"""

import json
from pathlib import Path
from typing import Any

from examples.eagle_training.context import Context
from examples.eagle_training.run import TrainingRun, run_command_line
from examples.smollm2_135m.prompts import (
    Prompt,
    chat_ids,
    eval_prompts,
    open_turns,
    usable_prompts,
)
from sgl_frspec.maps.files import atomic_file

SETTINGS = Path(__file__).parent / "settings.json"


class Run(TrainingRun):
    """A chat model: it writes user messages, then answers them."""

    map_sizes = (32768, 16384, 8192)

    def write_prompts(self) -> dict[str, Any]:
        """Let the target write user messages, and keep the usable ones."""
        path, s = self.work / "prompts.json", self.settings
        if path.is_file():
            return {"prompts": len(json.loads(path.read_text()))}
        turns = open_turns(self.tokenizer, s["prompts"], s["seed"])
        written = self.decode(
            [t.ids for t in turns],
            [s["prompt_temperature"]] * len(turns),
            s["prompt_seconds"],
            s["prompt_tokens"],
            s["prompt_min_p"],
        )
        end = self.model.config.eos_token_id
        candidates = [
            Prompt(t.opening + self.tokenizer.decode(ids[len(t.ids) : -1]), t.domain)
            for t, ids in zip(turns, written, strict=True)
            if ids and ids[-1] == end
        ]
        kept = usable_prompts(candidates, eval_prompts())
        rows = [[p.text, p.domain] for p in kept]
        with atomic_file(path) as file:
            file.write(json.dumps(rows, ensure_ascii=False).encode())
        return {"written": len(candidates), "prompts": len(kept)}

    def training_contexts(self) -> list[Context]:
        """The usable messages, as conversations up to the assistant's turn."""
        rows = json.loads((self.work / "prompts.json").read_text())
        return [Context(chat_ids(self.tokenizer, text), domain) for text, domain in rows]

    def held_out_contexts(self) -> list[Context]:
        """Our own prompts."""
        return [Context(chat_ids(self.tokenizer, p.text), p.domain) for p in eval_prompts()]


if __name__ == "__main__":
    run_command_line(Run, __doc__, SETTINGS)
