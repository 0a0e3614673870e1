"""Perplexity of text under the converted model: a check of the conversion as a whole.

    python -m examples.gemma3_270m.perplexity --model .cache/gemma3-270m FILE...

Reads the first 1,024 tokens of each file. A wrong norm, rotation or window shows as several bits a
byte; the model itself is near one.
"""

import argparse
import math
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

TOKENS = 1024
_CHARACTERS_PER_TOKEN = 20


@torch.inference_mode()
def perplexity(model: Any, tokenizer: Any, text: str) -> tuple[float, float]:
    """Return the perplexity of the first tokens of ``text``, and bits a byte."""
    ids = tokenizer.encode(text[: TOKENS * _CHARACTERS_PER_TOKEN])[:TOKENS]
    logits = model(torch.tensor([ids], device=model.device)).logits[0, :-1].float()
    wanted = torch.tensor(ids[1:], device=model.device)
    nats = torch.nn.functional.cross_entropy(logits, wanted, reduction="sum").item()
    size = len(tokenizer.decode(ids[1:]).encode())
    return math.exp(nats / len(wanted)), nats / math.log(2) / size


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True, help="folder made by convert")
    parser.add_argument("files", type=Path, nargs="+", metavar="FILE", help="UTF-8 text")
    arguments = parser.parse_args()
    model: Any = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    for path in arguments.files:
        text = path.read_text(encoding="utf-8", errors="ignore")
        value, bits = perplexity(model, tokenizer, text)
        print(f"{path.name}: perplexity {value:.2f}, {bits:.3f} bits a byte")


if __name__ == "__main__":
    main()
