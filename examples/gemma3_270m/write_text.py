"""Let the model continue the held-out beginnings, to judge token maps by what it writes.

    python -m examples.gemma3_270m.write_text --model .cache/gemma3-270m --out build/gemma3/held_out

Writes token ids, ``DOMAIN.ids``, a continuation a line, each up to where it starts to repeat
itself: sources for ``frspec inspect --text``. The text is sampled at temperature 0.8, since a base
model's greedy text is mostly loops. Works on a CPU too (17,000 tokens in some ten minutes on two
cores); a second call goes on after the last complete batch.
"""

import argparse
import math
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples.eagle_training.context import Context
from examples.eagle_training.corpus import (
    Document,
    load_documents,
    save_documents,
    without_loops,
)
from examples.eagle_training.decode import DecodeSettings, continue_all
from examples.gemma3_270m.prompts import held_out
from examples.gemma3_270m.rank_sources import write_ids

TEMPERATURE, MIN_P, SEED = 0.8, 0.05, 20


def continuations(model: Any, contexts: list[Context], tokens: int, seed: int) -> list[Document]:
    """Sample a continuation of up to ``tokens`` tokens of every context."""
    settings = DecodeSettings(
        stop_ids=(model.config.eos_token_id,),
        max_length=max(len(c.ids) for c in contexts) + tokens,
        rows=len(contexts),
        min_p=MIN_P,
        seed=seed,
        seconds=math.inf,
    )
    written = continue_all(
        model, [c.ids for c in contexts], [TEMPERATURE] * len(contexts), settings
    )
    return [
        Document(ids[: len(c.ids) + tokens], len(c.ids), c.domain, False)
        for c, ids in zip(contexts, written, strict=True)
    ]


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True, help="folder made by convert")
    parser.add_argument("--out", type=Path, required=True, help="folder for the .ids files")
    parser.add_argument("--tokens", type=int, default=144, help="of each continuation")
    parser.add_argument("--rows", type=int, default=60, help="continued at once")
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    model: Any = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=dtype)
    model.to(device)
    contexts = held_out(AutoTokenizer.from_pretrained(arguments.model))
    arguments.out.mkdir(parents=True, exist_ok=True)
    documents: list[Document] = []
    # Contexts of similar length beside each other: the longest decides when a batch ends.
    contexts.sort(key=lambda c: len(c.ids))
    for number, start in enumerate(range(0, len(contexts), arguments.rows)):
        path = arguments.out / f"batch{number}.safetensors"
        if not path.is_file():
            part = contexts[start : start + arguments.rows]
            written = continuations(model, part, arguments.tokens, SEED + number)
            save_documents(written, path, model.config.vocab_size)
        documents += load_documents(path)
        write_ids(without_loops(documents), arguments.out)


if __name__ == "__main__":
    main()
