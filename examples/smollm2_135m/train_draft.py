"""Make the draft again, on a machine with a GPU.

    python -m examples.smollm2_135m.convert --out .cache/smollm2-135m
    python -m examples.smollm2_135m.train_draft --model .cache/smollm2-135m --out build/draft

Stages: the target writes prompts, then replies; the draft is trained on the replies; its accept
length is measured on the held-out prompts. Each stage leaves its result in ``--work`` (default: the
output folder), and a second call goes on from there.
"""

import argparse
import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

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
from examples.eagle_training.model import DraftConfig, EagleDraft, load_draft, save_draft
from examples.eagle_training.train import Trainer, TrainSettings
from examples.eagle_training.tree import TreeShape
from examples.smollm2_135m.evaluate_draft import REPLY_TOKENS, accept_table, shared_with
from examples.smollm2_135m.prompts import (
    Prompt,
    chat_ids,
    eval_prompts,
    open_turns,
    usable_prompts,
)

SETTINGS = Path(__file__).parent / "settings.json"


class Run:
    """The stages of one run and what they share."""

    def __init__(self, model_folder: Path, out: Path, work: Path, settings: dict[str, Any]) -> None:
        self.out, self.work, self.settings = out, work, settings
        device = "cuda" if torch.cuda.is_available() else "cpu"
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        self.model: Any = AutoModelForCausalLM.from_pretrained(model_folder, dtype=dtype)
        self.model.to(device)
        self.tokenizer = AutoTokenizer.from_pretrained(model_folder)
        self.vocab_size = self.model.config.vocab_size
        self.train_settings = TrainSettings(**settings["train"])
        for folder in (out, work):
            folder.mkdir(parents=True, exist_ok=True)

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

    def _decode(self, seconds: float, length: int, min_p: float) -> DecodeSettings:
        s = self.settings
        return DecodeSettings(
            stop_ids=(self.model.config.eos_token_id,),
            max_length=length,
            rows=s["rows"],
            min_p=min_p,
            seed=s["seed"],
            seconds=seconds,
        )

    def write_prompts(self) -> dict[str, Any]:
        """Let the target write user messages, and keep the usable ones."""
        path, s = self.work / "prompts.json", self.settings
        if path.is_file():
            return {"prompts": len(json.loads(path.read_text()))}
        turns = open_turns(self.tokenizer, s["prompts"], s["seed"])
        decode = self._decode(s["prompt_seconds"], s["prompt_tokens"], s["prompt_min_p"])
        heat = [s["prompt_temperature"]] * len(turns)
        written = continue_all(self.model, [t.ids for t in turns], heat, decode)
        end = self.model.config.eos_token_id
        candidates = [
            Prompt(t.opening + self.tokenizer.decode(ids[len(t.ids) : -1]), t.domain)
            for t, ids in zip(turns, written, strict=True)
            if ids and ids[-1] == end
        ]
        kept = usable_prompts(candidates, eval_prompts())
        path.write_text(json.dumps([[p.text, p.domain] for p in kept], ensure_ascii=False))
        return {"written": len(candidates), "prompts": len(kept)}

    def write_replies(self) -> dict[str, Any]:
        """Let the target answer all prompts; the first prompts are kept for validation."""
        s = self.settings
        names = {
            part: self.work / f"{part}.safetensors" for part in ("train", "validation", "eval")
        }
        if not all(path.is_file() for path in names.values()):
            rows = json.loads((self.work / "prompts.json").read_text())
            prompts = [Prompt(text, domain) for text, domain in rows]
            held, used = prompts[: s["validation_prompts"]], prompts[s["validation_prompts"] :]
            train = self._replies(
                used, s["reply_temperatures"], s["document_tokens"], s["reply_seconds"]
            )
            whole = without_loops(train, self.model.device)
            save_documents(whole, names["train"], self.vocab_size)
            final = eval_prompts()
            greedy = self._replies([*held, *final], [0.0], s["eval_document_tokens"], math.inf)
            contexts = {tuple(chat_ids(self.tokenizer, p.text)) for p in final}
            groups: dict[str, list[Document]] = {"validation": [], "eval": []}
            for d in greedy:
                is_final = tuple(d.tokens[: d.context_length]) in contexts
                groups["eval" if is_final else "validation"].append(d)
            for part, documents in groups.items():
                save_documents(documents, names[part], self.vocab_size)
        parts = {part: load_documents(path) for part, path in names.items()}
        self._save_counts(parts["train"])
        return {
            "train_documents": len(parts["train"]),
            "train_tokens": sum(len(d.tokens) for d in parts["train"]),
            "reply_tokens": sum(len(d.reply) for d in parts["train"]),
            "validation_documents": len(parts["validation"]),
        }

    def _replies(
        self, prompts: list[Prompt], temperatures: list[float], length: int, seconds: float
    ) -> list[Document]:
        room = self.settings["reply_room"]
        contexts = [chat_ids(self.tokenizer, p.text) for p in prompts]
        jobs = [
            (prompt, context, temperatures[i % len(temperatures)])
            for i, (prompt, context) in enumerate(zip(prompts, contexts, strict=True))
            if len(context) + room <= length
        ]
        decode = self._decode(seconds, length, self.settings["reply_min_p"])
        written = continue_all(self.model, [j[1] for j in jobs], [j[2] for j in jobs], decode)
        return [
            Document(tokens, len(context), prompt.domain, heat == 0.0)
            for (prompt, context, heat), tokens in zip(jobs, written, strict=True)
            if len(tokens) > len(context) + 2
        ]

    def _save_counts(self, documents: list[Document]) -> None:
        counts = {"all": reply_counts(documents, self.vocab_size)}
        for domain in sorted({d.domain for d in documents}):
            chosen = [d for d in documents if d.domain == domain]
            counts[domain] = reply_counts(chosen, self.vocab_size)
        save_file(
            {k: v.to(torch.int32) for k, v in counts.items()}, self.out / "counts.safetensors"
        )

    def train(self) -> dict[str, Any]:
        """Train the draft; the best by accept length on the validation replies is kept."""
        torch.manual_seed(self.train_settings.seed)
        draft = EagleDraft(DraftConfig.like(self.model.config)).to(self.model.device)
        trainer = Trainer(draft, self.train_settings, self.work / "trainer", self.log)
        held = load_documents(self.work / "validation.safetensors")
        replies = ReplySet(self.model, held, REPLY_TOKENS)
        data = TrainingSet(self.model, load_documents(self.work / "train.safetensors"))
        shared = shared_with(self.model)

        def check(current: EagleDraft) -> float:
            copy = EagleDraft(current.config).to(self.model.device)
            copy.load_state_dict(current.state_dict())
            copy = copy.to(self.model.dtype)
            return mean_by_domain(accept_lengths(copy, shared, replies, TreeShape()))["all"]

        trainer.run(data, shared, check, lambda best: save_draft(best, self.out / "draft"))
        return {"batches": trainer.batches, "epochs": trainer.epoch, "best": trainer.best}

    def evaluate(self) -> dict[str, Any]:
        """Accept length by domain, full vocabulary and maps ranked by the generated tokens."""
        draft = load_draft(self.out / "draft", self.model.dtype).to(self.model.device)
        counts = reply_counts(load_documents(self.work / "train.safetensors"), self.vocab_size)
        counts[self.model.config.eos_token_id] = counts.max() + 1
        ranked = torch.argsort(counts, descending=True, stable=True)
        table: dict[str, Any] = {}
        for part in ("validation", "eval"):
            documents = load_documents(self.work / f"{part}.safetensors")
            table[part] = accept_table(self.model, draft, documents, ranked)
        (self.out / "evaluation.json").write_text(json.dumps(table, indent=2) + "\n")
        return table


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True, help="folder made by convert")
    parser.add_argument("--out", type=Path, required=True, help="folder for draft and logs")
    parser.add_argument("--work", type=Path, help="folder for intermediate results")
    parser.add_argument("--settings", type=Path, default=SETTINGS, help="settings file")
    arguments = parser.parse_args()
    settings = json.loads(arguments.settings.read_text(encoding="utf-8"))
    start = time.monotonic()
    run = Run(arguments.model, arguments.out, arguments.work or arguments.out, settings)
    run.log(settings=settings, torch=torch.__version__, device=str(run.model.device))
    run.stage("prompts", run.write_prompts)
    run.stage("replies", run.write_replies)
    run.stage("train", run.train)
    run.stage("evaluate", run.evaluate)
    run.log(total_seconds=round(time.monotonic() - start, 1))


if __name__ == "__main__":
    main()
