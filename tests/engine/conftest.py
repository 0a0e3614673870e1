"""Real SGLang engines in processes of their own."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from sgl_frspec.cpu_engine.environment import cpu_environment
from tests.engine.chain_model import Chain
from tests.engine.run_engine import MARK

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 300
Answers = list[list[dict[str, Any]]]

ENGINE = {
    "device": "cpu",
    "attention_backend": "frspec_cpu",
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
    "dtype": "float32",
    "mem_fraction_static": 0.05,
    "max_total_tokens": 4096,
    "disable_cuda_graph": True,
    "skip_tokenizer_init": True,
    "log_level": "info",
}


def engine_process(job: dict[str, Any], folder: Path) -> subprocess.CompletedProcess[str]:
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "job.json"
    file.write_text(json.dumps(job))
    return subprocess.run(
        [sys.executable, str(ROOT / "tests/engine/run_engine.py"), str(file)],
        env=cpu_environment(os.environ),
        cwd=ROOT,
        timeout=TIMEOUT_S,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="session")
def run_engine(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Answers]:
    def run(
        chain: Chain, batches: list[list[list[int]]], new_tokens: int | None, **options: Any
    ) -> Answers:
        engine = {**ENGINE, "model_path": str(chain.target), **options}
        if options.get("speculative_algorithm"):
            engine["speculative_draft_model_path"] = str(chain.draft)
        sampling = {"max_new_tokens": new_tokens, "temperature": 0, "ignore_eos": True}
        job = {"engine": engine, "sampling": sampling, "batches": batches}
        done = engine_process(job, tmp_path_factory.mktemp("engine"))
        lines = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
        assert lines, done.stdout[-3000:] + done.stderr[-5000:]
        return json.loads(lines[-1].removeprefix(MARK))["answers"]

    return run


def greedy(chain: Chain, prompt: list[int], new_tokens: int) -> list[int]:
    """What another implementation of the target generates, with its smallest margin checked."""
    model = AutoModelForCausalLM.from_pretrained(chain.target, dtype=torch.float32)
    ids = list(prompt)
    with torch.inference_mode():
        for _ in range(new_tokens):
            logits = model(torch.tensor([ids])).logits[0, -1]
            best, second = logits.topk(2).values
            # A closer race could go either way between two orders of summation.
            assert best - second > 1e-4
            ids.append(int(logits.argmax()))
    return ids[len(prompt) :]
