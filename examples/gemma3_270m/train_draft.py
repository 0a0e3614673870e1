"""Make an EAGLE-2 draft of Gemma-3-270M, on a machine with a GPU.

    python -m examples.gemma3_270m.convert --out .cache/gemma3-270m
    python -m examples.gemma3_270m.train_draft --model .cache/gemma3-270m --out build/gemma3

The model has no chat template: it writes beginnings of texts and programs from a few first words,
then goes on with them. The draft is trained on that, and its accept length is measured on held-out
beginnings. Each stage leaves its result in ``--work`` (default: the output folder), and a second
call goes on from there.
"""

import json
from pathlib import Path
from typing import Any

from examples.eagle_training.context import Context
from examples.eagle_training.run import TrainingRun, run_command_line
from examples.gemma3_270m.prompts import held_out, starts, usable
from sgl_frspec.maps.files import atomic_file

SETTINGS = Path(__file__).parent / "settings.json"


class Run(TrainingRun):
    """A base model, which continues."""

    map_sizes = (131072, 65536, 32768, 16384, 8192, 4096)

    def write_prompts(self) -> dict[str, Any]:
        """Let the target write beginnings, and keep the usable ones."""
        path, s = self.work / "beginnings.json", self.settings
        if path.is_file():
            return {"beginnings": len(self.training_contexts())}
        opened = starts(self.tokenizer, s["beginnings"], s["seed"])
        written = self.decode(
            [c.ids for c in opened],
            [s["beginning_temperature"]] * len(opened),
            s["beginning_seconds"],
            s["beginning_tokens"],
            s["beginning_min_p"],
        )
        whole = [
            Context(ids, c.domain)
            for c, ids in zip(opened, written, strict=True)
            if len(ids) == s["beginning_tokens"]
        ]
        kept = usable(whole, self.held_out_contexts())
        with atomic_file(path) as file:
            file.write(json.dumps(kept).encode())
        return {"written": len(whole), "beginnings": len(kept)}

    def training_contexts(self) -> list[Context]:
        """The usable beginnings."""
        rows = json.loads((self.work / "beginnings.json").read_text())
        return [Context(ids, domain) for ids, domain in rows]

    def held_out_contexts(self) -> list[Context]:
        """Our own beginnings."""
        return held_out(self.tokenizer)


if __name__ == "__main__":
    run_command_line(Run, __doc__, SETTINGS)
