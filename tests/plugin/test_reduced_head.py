"""The reduced head: the right rows, no larger allocation on the way, and heads that are refused."""

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from sgl_frspec.reduced_head import gather_head, share_embedding_and_head

VOCAB, HIDDEN = 4096, 48


class Draft(nn.Module):
    """The part of SGLang's draft models that shares the target's weights."""

    def __init__(self, tied):
        super().__init__()
        self.model: Any = nn.Module()
        self.model.embed_tokens = nn.Embedding(VOCAB, HIDDEN)
        self.lm_head = self.model.embed_tokens if tied else nn.Linear(HIDDEN, VOCAB, bias=False)

    def set_embed_and_head(self, embed, head):
        del self.model.embed_tokens.weight
        del self.lm_head.weight
        self.model.embed_tokens.weight = embed
        self.lm_head.weight = head


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_are_the_heads_own(dtype):
    head = nn.Parameter(torch.randn(VOCAB + 64, HIDDEN).to(dtype))
    ids = torch.randperm(VOCAB)[:300].sort().values
    before = copy.deepcopy(head)
    reduced = gather_head(head, ids, VOCAB)
    assert torch.equal(reduced, head[ids])
    assert reduced.dtype == dtype
    assert not reduced.requires_grad
    reduced.zero_()
    assert torch.equal(head, before)


def test_nothing_larger_than_the_result_is_allocated():
    head = torch.randn(VOCAB, HIDDEN)
    ids = torch.arange(0, VOCAB, 16)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as events:
        reduced = gather_head(head, ids, VOCAB)
    allocated = sum(max(event.self_cpu_memory_usage, 0) for event in events.events() or ())
    assert allocated >= reduced.nbytes
    assert allocated < 1.2 * reduced.nbytes < head.nbytes


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_draft_gets_both(tied):
    draft = Draft(tied)
    embedding = nn.Parameter(torch.randn(VOCAB, HIDDEN))
    reduced = gather_head(embedding, torch.arange(7, 500, 3), VOCAB)
    own = VOCAB * HIDDEN * 4 * (1 if tied else 2)
    assert share_embedding_and_head(draft, embedding, reduced) == own
    assert draft.model.embed_tokens.weight is embedding
    assert draft.lm_head.weight is reduced
    assert draft.lm_head is not draft.model.embed_tokens
    ids = torch.tensor([3, 4095])
    assert torch.equal(draft.model.embed_tokens(ids), embedding[ids])


def test_tables_that_are_the_targets_free_nothing():
    draft = Draft(tied=False)
    embedding = draft.model.embed_tokens.weight
    reduced = gather_head(embedding, torch.arange(9), VOCAB)
    assert share_embedding_and_head(draft, embedding, reduced) == VOCAB * HIDDEN * 4


@pytest.mark.parametrize(
    ("head", "words"),
    [
        (None, "no head"),
        (torch.zeros(VOCAB, HIDDEN, dtype=torch.int32), "torch.int32"),
        (torch.zeros(VOCAB // 2, HIDDEN), "2048 rows for 4096 tokens"),
        (torch.zeros(VOCAB), "FRSPEC gathers rows"),
    ],
    ids=["none", "quantised", "shard", "vector"],
)
def test_heads_that_are_refused(head, words):
    with pytest.raises(ValueError, match=words):
        gather_head(head, torch.tensor([1]), VOCAB)


def test_the_algorithm_answers_as_eagle_does():
    """SGLang dispatches on these without asking which algorithm it has."""
    from sgl_frspec.algorithm import NAME, FrSpecAlgorithm, SpeculativeAlgorithm

    ours = FrSpecAlgorithm(NAME, lambda server_args: object, supports_overlap=True)
    asked = ("is_", "supports_", "need_", "carries_", "has_")
    names = [name for name in vars(SpeculativeAlgorithm) if name.startswith(asked)]
    assert len(names) > 15
    # Not tested with mixed steps: FRSPEC turns them off.
    answers = {name: getattr(ours, name)() for name in names if name != "supports_mixed_chunk"}
    eagle = SpeculativeAlgorithm.EAGLE
    assert answers == {name: getattr(eagle, name)() for name in answers}
    assert ours.supports_mixed_chunk() is False
