"""What Gemma 3 asks of the training code: scaled embeddings, sliding windows, wide heads."""

from pathlib import Path
from typing import Any

import pytest
import torch

from examples.eagle_training.accept_by_size import accept_by_size, shared_with
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
from tests.examples.tiny_gemma3 import HEAD_DIM, HIDDEN, WINDOW, tiny_gemma3

STOP = 1
LENGTH = 5 * WINDOW


@pytest.fixture(scope="module")
def target() -> Any:
    return tiny_gemma3(seed=2)


@pytest.fixture(scope="module")
def documents(target: Any) -> list[Document]:
    generator = torch.Generator().manual_seed(3)
    lengths = [3, 9, 2, 5, 7, 4]
    contexts = [[2, *torch.randint(7, 300, (n,), generator=generator).tolist()] for n in lengths]
    settings = DecodeSettings(stop_ids=(STOP,), max_length=LENGTH, rows=3)
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
    table = accept_by_size(target, loaded, replies, torch.arange(304), (304, 64))
    cycles = accept_lengths(loaded, stored, replies, TreeShape())
    everything = [n for reply in cycles for n in reply.accept_lengths]
    assert table["304"]["all"] == pytest.approx(sum(everything) / len(everything), abs=1e-4)
    assert (table["304"]["outside"], table["64"]["outside"] > 0.3) == (0.0, True)


def test_other_targets_multiply_by_nothing() -> None:
    class Model:
        def get_input_embeddings(self) -> torch.nn.Embedding:
            return torch.nn.Embedding(3, 2)

    assert embedding_factor(Model()) == 1.0
