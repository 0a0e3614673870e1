"""The held-out beginnings as token ids, for ``bench map-sizes``.

python -m examples.gemma3_270m.write_prompts --model .cache/gemma3-270m --out prompts.jsonl
"""

import argparse
import json
from pathlib import Path

from transformers import AutoTokenizer

from examples.gemma3_270m.prompts import held_out
from sgl_frspec.maps.files import atomic_file


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True, help="folder made by convert")
    parser.add_argument("--out", type=Path, required=True, help="JSONL, a beginning a line")
    arguments = parser.parse_args()
    contexts = held_out(AutoTokenizer.from_pretrained(arguments.model))
    lines = [json.dumps({"domain": c.domain, "ids": c.ids}) for c in contexts]
    with atomic_file(arguments.out) as file:
        file.write("".join(f"{line}\n" for line in lines).encode())


if __name__ == "__main__":
    main()
