"""What the model wrote for training, as sources of a token map, a file a domain.

    python -m examples.gemma3_270m.rank_sources --replies build/gemma3/train.safetensors \\
        --out build/gemma3/sources

``DOMAIN.ids`` holds token ids, a document a line, which ``frspec rank`` reads; weights say how much
of the traffic each domain is.
"""

import argparse
from pathlib import Path

from examples.eagle_training.corpus import Document, load_documents
from examples.gemma3_270m.prompts import DOMAINS


def write_ids(documents: list[Document], folder: Path) -> None:
    """Write what was generated, without its context: one file a domain, a document a line."""
    folder.mkdir(parents=True, exist_ok=True)
    for domain in DOMAINS:
        lines = [" ".join(map(str, d.reply)) for d in documents if d.domain == domain]
        text = "".join(f"{line}\n" for line in lines)
        (folder / f"{domain}.ids").write_text(text, encoding="utf-8")


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--replies", type=Path, required=True, help="train_draft's documents")
    parser.add_argument("--out", type=Path, required=True, help="folder for the sources")
    arguments = parser.parse_args()
    write_ids(load_documents(arguments.replies), arguments.out)


if __name__ == "__main__":
    main()
