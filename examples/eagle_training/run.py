"""A whole run: the target writes text, the draft is trained on it and measured.

What the target is asked to continue is the example's own: it derives from :class:`TrainingRun`.
Every stage leaves its result in a folder, and a second call goes on from there.
"""

import argparse
import json
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples.eagle_training.accept_by_size import REPLY_TOKENS, accept_by_size, shared_with
from examples.eagle_training.context import Context
from examples.eagle_training.corpus import (
    Document,
    load_documents,
    reply_counts,
    save_documents,
    without_loops,
)
from examples.eagle_training.decode import DecodeSettings, continue_all
from examples.eagle_training.evaluate import ReplySet, accept_lengths, mean_by_domain
from examples.eagle_training.features import TrainingSet
from examples.eagle_training.model import (
    DraftConfig,
    EagleDraft,
    embedding_factor,
    load_draft,
    save_draft,
)
from examples.eagle_training.train import Trainer, TrainSettings
from examples.eagle_training.tree import Shared, TreeShape

PARTS = ("train", "validation", "eval")
STAGES = ("prompts", "replies", "train", "evaluate")


class TrainingRun(ABC):
    """The stages of one run and what they share."""

    # Sizes of the map at which the finished draft is measured, beside the whole vocabulary.
    map_sizes: Sequence[int]

    def __init__(self, model_folder: Path, out: Path, work: Path, settings: dict[str, Any]) -> None:
        self.out, self.work, self.settings = out, work, settings
        device = "cuda" if torch.cuda.is_available() else "cpu"
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        self.model: Any = AutoModelForCausalLM.from_pretrained(model_folder, dtype=dtype)
        self.model.to(device)
        self.tokenizer: Any = AutoTokenizer.from_pretrained(model_folder)
        self.vocab_size: int = self.model.config.vocab_size
        self.train_settings = TrainSettings(**settings["train"])
        for folder in (out, work):
            folder.mkdir(parents=True, exist_ok=True)

    @abstractmethod
    def write_prompts(self) -> dict[str, Any]:
        """Let the target write what it will continue, unless that is there already."""

    @abstractmethod
    def training_contexts(self) -> list[Context]:
        """What :meth:`write_prompts` left; the first are kept for validation."""

    @abstractmethod
    def held_out_contexts(self) -> list[Context]:
        """The example's own prompts, never trained on."""

    def log(self, **row: Any) -> None:
        """Print one row and append it to the run's log."""
        print(json.dumps(row), flush=True)
        with (self.out / "run_log.jsonl").open("a", encoding="utf-8") as f:
            f.write(json.dumps(row) + "\n")

    def stage(self, name: str, work: Callable[[], dict[str, Any]]) -> None:
        """Run one stage and log its duration and figures."""
        start = time.monotonic()
        figures = work()
        self.log(stage=name, seconds=round(time.monotonic() - start, 1), **figures)

    def run(self, names: Sequence[str] = STAGES) -> None:
        """Run the stages of these names, in their order."""
        start = time.monotonic()
        self.log(settings=self.settings, torch=torch.__version__, device=str(self.model.device))
        work = (self.write_prompts, self.write_replies, self.train, self.evaluate)
        for name, do in zip(STAGES, work, strict=True):
            if name in names:
                self.stage(name, do)
        self.log(total_seconds=round(time.monotonic() - start, 1))

    def decode(
        self,
        contexts: list[list[int]],
        heat: list[float],
        seconds: float,
        length: int,
        min_p: float,
    ) -> list[list[int]]:
        """Continue contexts with the run's settings."""
        settings = DecodeSettings(
            stop_ids=(self.model.config.eos_token_id,),
            max_length=length,
            rows=self.settings["rows"],
            min_p=min_p,
            seed=self.settings["seed"],
            seconds=seconds,
        )
        return continue_all(self.model, contexts, heat, settings)

    def documents(self, part: str) -> list[Document]:
        """What :meth:`write_replies` left: ``train``, ``validation`` or ``eval``."""
        return load_documents(self.work / f"{part}.safetensors")

    def write_replies(self) -> dict[str, Any]:
        """Let the target continue all contexts; those held out are continued greedily."""
        s = self.settings
        names = {part: self.work / f"{part}.safetensors" for part in PARTS}
        if not all(path.is_file() for path in names.values()):
            contexts = self.training_contexts()
            held, used = contexts[: s["validation_prompts"]], contexts[s["validation_prompts"] :]
            train = self._replies(
                used, s["reply_temperatures"], s["document_tokens"], s["reply_seconds"]
            )
            whole = without_loops(train, self.model.device)
            save_documents(whole, names["train"], self.vocab_size)
            final = self.held_out_contexts()
            greedy = self._replies([*held, *final], [0.0], s["eval_document_tokens"], math.inf)
            finals = {tuple(context.ids) for context in final}
            groups: dict[str, list[Document]] = {"validation": [], "eval": []}
            for d in greedy:
                is_final = tuple(d.tokens[: d.context_length]) in finals
                groups["eval" if is_final else "validation"].append(d)
            for part, documents in groups.items():
                save_documents(documents, names[part], self.vocab_size)
        parts = {part: self.documents(part) for part in PARTS}
        self._save_counts(parts["train"])
        return {
            "train_documents": len(parts["train"]),
            "train_tokens": sum(len(d.tokens) for d in parts["train"]),
            "reply_tokens": sum(len(d.reply) for d in parts["train"]),
            "validation_documents": len(parts["validation"]),
            "eval_documents": len(parts["eval"]),
        }

    def _replies(
        self, contexts: list[Context], temperatures: list[float], length: int, seconds: float
    ) -> list[Document]:
        room = self.settings["reply_room"]
        jobs = [
            (context, temperatures[i % len(temperatures)])
            for i, context in enumerate(contexts)
            if len(context.ids) + room <= length
        ]
        written = self.decode(
            [context.ids for context, _ in jobs],
            [heat for _, heat in jobs],
            seconds,
            length,
            self.settings["reply_min_p"],
        )
        return [
            Document(tokens, len(context.ids), context.domain, heat == 0.0)
            for (context, heat), tokens in zip(jobs, written, strict=True)
            if len(tokens) > len(context.ids) + 2
        ]

    def _save_counts(self, documents: list[Document]) -> None:
        counts = {"all": reply_counts(documents, self.vocab_size)}
        for domain in sorted({d.domain for d in documents}):
            chosen = [d for d in documents if d.domain == domain]
            counts[domain] = reply_counts(chosen, self.vocab_size)
        tensors = {k: v.to(torch.int32) for k, v in counts.items()}
        save_file(tensors, self.out / "counts.safetensors")

    def train(self) -> dict[str, Any]:
        """Train the draft; the best by accept length on the validation replies is kept."""
        torch.manual_seed(self.train_settings.seed)
        draft = EagleDraft(DraftConfig.like(self.model.config)).to(self.model.device)
        trainer = Trainer(draft, self.train_settings, self.work / "trainer", self.log)
        replies = ReplySet(self.model, self.documents("validation"), REPLY_TOKENS)
        data = TrainingSet(self.model, self.documents("train"))
        factor = embedding_factor(self.model)
        stored = shared_with(self.model)
        shared = Shared(stored.embedding * factor, stored.head, None)

        def check(current: EagleDraft) -> float:
            copy = EagleDraft(current.config).to(self.model.device)
            copy.load_state_dict(current.state_dict())
            copy = copy.to(self.model.dtype)
            return mean_by_domain(accept_lengths(copy, shared, replies, TreeShape()))["all"]

        def keep(best: EagleDraft) -> None:
            save_draft(best, self.out / "draft", factor)

        trainer.run(data, shared, check, keep)
        return {"batches": trainer.batches, "epochs": trainer.epoch, "best": trainer.best}

    def ranked_by_replies(self) -> torch.Tensor:
        """The vocabulary in the order of the training replies' counts, end of turn first."""
        counts = reply_counts(self.documents("train"), self.vocab_size)
        counts[self.model.config.eos_token_id] = counts.max() + 1
        return torch.argsort(counts, descending=True, stable=True)

    def evaluate(self) -> dict[str, Any]:
        """Accept length by domain, full vocabulary and maps ranked by the generated tokens."""
        draft = load_draft(self.out / "draft", self.model.dtype).to(self.model.device)
        ranked = self.ranked_by_replies()
        table: dict[str, Any] = {}
        for part in ("validation", "eval"):
            replies = ReplySet(self.model, self.documents(part), REPLY_TOKENS)
            sizes = (self.vocab_size, *self.map_sizes)
            table[part] = accept_by_size(self.model, draft, replies, ranked, sizes)
        (self.out / "evaluation.json").write_text(json.dumps(table, indent=2) + "\n")
        return table


def run_command_line(run: type[TrainingRun], description: str | None, settings: Path) -> None:
    """Parse the arguments that every example has, and run its stages."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True, help="folder made by convert")
    parser.add_argument("--out", type=Path, required=True, help="folder for draft and logs")
    parser.add_argument("--work", type=Path, help="folder for intermediate results")
    parser.add_argument("--settings", type=Path, default=settings, help="settings file")
    parser.add_argument(
        "--stage", choices=STAGES, action="append", help="only this one; repeatable (default: all)"
    )
    arguments = parser.parse_args()
    values = json.loads(arguments.settings.read_text(encoding="utf-8"))
    run(arguments.model, arguments.out, arguments.work or arguments.out, values).run(
        arguments.stage or STAGES
    )
