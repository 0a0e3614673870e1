"""What Gemma 3 asks of the training code: scaled embeddings, sliding windows, wide heads."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from examples.eagle_training.accept_by_size import accept_by_size, shared_with
from examples.eagle_training.context import Context
from examples.eagle_training.corpus import Document
from examples.eagle_training.decode import DecodeSettings, continue_all
from examples.eagle_training.evaluate import ReplySet, accept_lengths
from examples.eagle_training.model import (
    DraftConfig,
    EagleDraft,
    embedding_factor,
    load_draft,
    save_draft,
)
from examples.eagle_training.tree import Shared, TreeShape
from examples.gemma3_270m.prompts import DOMAINS
from examples.gemma3_270m.rank_sources import write_ids
from examples.gemma3_270m.train_draft import SETTINGS, Run
from tests.examples.tiny_gemma3 import HEAD_DIM, HIDDEN, WINDOW, tiny_gemma3

STOP = 1
LENGTH = 5 * WINDOW


@pytest.fixture(scope="module")
def target() -> Any:
    return tiny_gemma3(seed=2)


@pytest.fixture(scope="module")
def documents(target: Any) -> list[Document]:
    generator = torch.Generator().manual_seed(3)
    lengths = [3, 9, 2, 5]
    contexts = [[2, *torch.randint(7, 300, (n,), generator=generator).tolist()] for n in lengths]
    settings = DecodeSettings(stop_ids=(STOP,), max_length=LENGTH, rows=2)
    written = continue_all(target, contexts, [0.0] * len(contexts), settings)
    target.set_attn_implementation("sdpa")
    return [
        Document(tokens, len(context), "text", True)
        for context, tokens in zip(contexts, written, strict=True)
    ]


@torch.no_grad()
def test_decoding_past_the_window_equals_generate(target: Any, documents: list[Document]) -> None:
    assert max(len(d.tokens) for d in documents) > 2 * WINDOW
    for document in documents:
        expected = document.tokens[: document.context_length]
        while len(expected) < LENGTH and (
            len(expected) == document.context_length or expected[-1] != STOP
        ):
            expected.append(int(target(torch.tensor([expected])).logits[0, -1].argmax()))
        assert document.tokens == expected


def test_sizes_and_rotation_of_the_draft(target: Any) -> None:
    config = DraftConfig.like(target.config)
    assert (config.head_dim, config.num_attention_heads, config.num_key_value_heads) == (
        HEAD_DIM,
        4,
        1,
    )
    assert config.rope_theta == 1_000_000.0
    draft = EagleDraft(config)
    assert draft.layer.self_attn.q_proj.weight.shape == (4 * HEAD_DIM, HIDDEN)


@torch.no_grad()
def test_a_saved_draft_works_with_the_stored_embedding(
    target: Any, documents: list[Document], tmp_path: Path
) -> None:
    """Trained on the embedding that the target multiplies, served with the one it stores."""
    factor = embedding_factor(target)
    assert factor == pytest.approx(HIDDEN**0.5)
    stored = shared_with(target)
    ids = torch.tensor([5, 40, 9])
    trained = Shared(stored.embedding * factor, stored.head, None)
    torch.testing.assert_close(trained.embedding[ids], target.get_input_embeddings()(ids))

    torch.manual_seed(4)
    draft = EagleDraft(DraftConfig.like(target.config))
    for parameter in draft.parameters():
        parameter.copy_(parameter.bfloat16())
    before = draft.fc.weight.clone()
    save_draft(draft, tmp_path, factor)
    assert torch.equal(draft.fc.weight, before)
    loaded = load_draft(tmp_path)
    hidden = torch.randn(3, HIDDEN)
    expected = draft.mix(trained.embedding[ids], hidden)
    found = loaded.mix(stored.embedding[ids], hidden)
    # Rounding the scaled columns to bf16 is all that differs.
    torch.testing.assert_close(found, expected, atol=0.05, rtol=0)
    assert (loaded.mix(trained.embedding[ids], hidden) - expected).abs().max() > 0.5

    replies = ReplySet(target, documents, reply_tokens=16)
    table = accept_by_size(target, loaded, replies, torch.arange(305), (305, 64))
    cycles = accept_lengths(loaded, stored, replies, TreeShape())
    everything = [n for reply in cycles for n in reply.accept_lengths]
    assert table["305"]["all"] == pytest.approx(sum(everything) / len(everything), abs=1e-4)
    assert (table["305"]["outside"], table["64"]["outside"] > 0.3) == (0.0, True)


class TinyRun(Run):
    """The run as it is, but for the number and length of its held-out beginnings."""

    map_sizes = (64,)

    def held_out_contexts(self) -> list[Context]:
        return [Context(c.ids[:10], c.domain) for c in super().held_out_contexts()[::10]]


def test_a_whole_run_and_its_second_call(gemma3: Path, tmp_path: Path) -> None:
    """From first words to a measured draft, with the settings of the real run made small."""
    settings: dict[str, Any] = json.loads(SETTINGS.read_text())
    settings |= {
        "beginnings": 32,
        "beginning_tokens": 20,
        "document_tokens": 36,
        "eval_document_tokens": 36,
        "reply_room": 8,
        "rows": 64,
        "validation_prompts": 6,
    }
    settings["train"] |= {"seconds": 1, "tokens_per_batch": 512, "steps": 2, "warmup_batches": 2}
    TinyRun(gemma3, tmp_path, tmp_path, settings).run()
    log = [json.loads(line) for line in (tmp_path / "run_log.jsonl").read_text().splitlines()]
    stages = {row["stage"]: row for row in log if "stage" in row}
    assert list(stages) == ["prompts", "replies", "train", "evaluate"]
    assert stages["prompts"]["beginnings"] > 20
    assert stages["replies"]["train_documents"] > 10
    assert stages["replies"]["eval_documents"] == 12
    table = json.loads((tmp_path / "evaluation.json").read_text())["eval"]
    assert table["305"]["all"] == pytest.approx(stages["evaluate"]["eval"]["305"]["all"])
    assert table["305"]["outside"] == 0.0 < table["64"]["outside"] < 0.9

    run = TinyRun(gemma3, tmp_path, tmp_path, settings)
    held = {tuple(c.ids) for c in run.held_out_contexts()}
    assert {tuple(d.tokens[: d.context_length]) for d in run.documents("eval")} <= held
    write_ids(run.documents("train"), tmp_path / "sources")
    sources = {d: (tmp_path / "sources" / f"{d}.ids").read_text().splitlines() for d in DOMAINS}
    replies = [" ".join(map(str, d.reply)) for d in run.documents("train")]
    assert sorted(line for lines in sources.values() for line in lines) == sorted(replies)
    counts = load_file(tmp_path / "counts.safetensors")
    written = [t for d in run.documents("train") for t in d.reply]
    assert counts["all"].tolist() == torch.bincount(torch.tensor(written), minlength=305).tolist()
    assert int(run.ranked_by_replies()[0]) == STOP

    kept = {p: (tmp_path / p).stat().st_mtime_ns for p in ("beginnings.json", "train.safetensors")}
    assert run.write_prompts() == {"beginnings": stages["prompts"]["beginnings"]}
    assert run.write_replies()["train_documents"] == stages["replies"]["train_documents"]
    assert {p: (tmp_path / p).stat().st_mtime_ns for p in kept} == kept


def test_other_targets_multiply_by_nothing() -> None:
    class Model:
        def get_input_embeddings(self) -> torch.nn.Embedding:
            return torch.nn.Embedding(3, 2)

    assert embedding_factor(Model()) == 1.0
