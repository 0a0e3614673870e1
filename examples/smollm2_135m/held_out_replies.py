"""What the target answers to prompts that no map was ranked by, as token ids: the text to judge
maps by.

    python -m examples.smollm2_135m.held_out_replies --work build/draft \\
        --out examples/smollm2_135m/held_out

Takes the greedy replies that ``train_draft`` has kept of the held-out prompts (a file a domain) and
of the validation prompts, which the target wrote itself (``own``), each up to where it starts to
repeat itself.
"""

import argparse
import lzma
from collections import defaultdict
from pathlib import Path

from examples.eagle_training.corpus import load_documents, without_loops
from sgl_frspec.maps.files import atomic_file


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--work", type=Path, required=True, help="train_draft's folder")
    parser.add_argument("--out", type=Path, required=True, help="folder for the .ids.xz files")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    lines: dict[str, list[str]] = defaultdict(list)
    for part in ("eval", "validation"):
        for document in without_loops(load_documents(arguments.work / f"{part}.safetensors")):
            domain = document.domain if part == "eval" else "own"
            lines[domain].append(" ".join(map(str, document.reply)))
    for domain, replies in lines.items():
        with atomic_file(arguments.out / f"{domain}.ids.xz") as file:
            file.write(lzma.compress(("\n".join(replies) + "\n").encode(), preset=9))


if __name__ == "__main__":
    main()
