"""The draft's forms against each other: training, tree and decoding must compute the same model."""

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from examples.eagle_training.corpus import (
    Document,
    load_documents,
    loop_starts,
    reply_counts,
    save_documents,
    without_loops,
)
from examples.eagle_training.decode import DecodeSettings, continue_all, pick_tokens
from examples.eagle_training.evaluate import (
    Cycles,
    ReplySet,
    accept_lengths,
    before,
    mean_by_domain,
)
from examples.eagle_training.features import TrainingSet, target_features
from examples.eagle_training.loss import head_loss
from examples.eagle_training.model import DraftConfig, EagleDraft, load_draft, save_draft
from examples.eagle_training.train import Trainer, TrainSettings, unroll
from examples.eagle_training.tree import Shared, TreeShape, accepted, grow, read_prefix

VOCAB = 61
STOP = 7


@pytest.fixture(scope="module")
def target() -> Any:
    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 500.0},
        initializer_range=0.3,
    )
    return LlamaForCausalLM(config).eval()


@pytest.fixture
def draft(target: Any) -> EagleDraft:
    draft = EagleDraft(DraftConfig.like(target.config))
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return draft


@pytest.fixture
def shared(target: Any) -> Shared:
    return Shared(target.model.embed_tokens.weight.detach(), target.lm_head.weight.detach(), None)


def as_llama(draft: EagleDraft) -> Any:
    """The same layer in transformers' own Llama, with an input norm that does nothing."""
    c = draft.config
    config = LlamaConfig(
        vocab_size=c.vocab_size,
        hidden_size=c.hidden_size,
        intermediate_size=c.intermediate_size,
        num_hidden_layers=1,
        num_attention_heads=c.num_attention_heads,
        num_key_value_heads=c.num_key_value_heads,
        max_position_embeddings=c.max_position_embeddings,
        rms_norm_eps=c.rms_norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": c.rope_theta},
    )
    model = LlamaForCausalLM(config).model
    missing = model.layers[0].load_state_dict(draft.layer.state_dict(), strict=False)
    assert missing.missing_keys == ["input_layernorm.weight"]
    model.layers[0].input_layernorm = torch.nn.Identity()
    setattr(model, "norm", torch.nn.Identity())  # noqa: B010
    return model.eval()


def chain(draft: EagleDraft, embedding: torch.Tensor, tokens: torch.Tensor, hidden: torch.Tensor):
    """Outputs of a whole sequence by transformers' Llama: ``[1, L, H]`` in, ``[L, H]`` out."""
    mixed = draft.mix(F.embedding(tokens, embedding)[None], hidden[None])
    return as_llama(draft)(inputs_embeds=mixed).last_hidden_state[0]


@torch.no_grad()
def test_first_step_is_one_llama_layer(draft: EagleDraft, shared: Shared) -> None:
    tokens, hidden = torch.randint(VOCAB, (11,)), torch.randn(11, 32)
    found = unroll(draft, shared.embedding, tokens[None], hidden[None], 1)[0, 0]
    torch.testing.assert_close(found, chain(draft, shared.embedding, tokens, hidden))


@torch.no_grad()
def test_unroll_equals_drafting_a_chain(draft: EagleDraft, shared: Shared) -> None:
    """Entry (j, i) is what one gets by reading the text up to i - j and drafting from there."""
    length, steps = 9, 4
    tokens, hidden = torch.randint(VOCAB, (length,)), torch.randn(length, 32)
    found = unroll(draft, shared.embedding, tokens[None], hidden[None], steps)[:, 0]
    for last in range(length):
        for step in range(1, min(steps, last + 1)):
            known = last - step + 1
            own = hidden[:known]
            for _ in range(step):
                out = chain(draft, shared.embedding, tokens[: len(own)], own)
                own = torch.cat((own, out[-1:]))
            out = chain(draft, shared.embedding, tokens[: last + 1], own)
            torch.testing.assert_close(found[step, last], out[-1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("greedy_share", [0.0, 0.4, 1.0])
def test_head_loss_and_its_gradient(greedy_share: float) -> None:
    steps, count, hidden = 3, 10, 8
    head = torch.randn(VOCAB, hidden)
    target = torch.randn(count, hidden)
    weights = torch.rand(steps, count)
    drafted = torch.randn(steps, count, hidden, requires_grad=True)
    scale = torch.tensor([1.0, 0.5, 2.0])
    found = head_loss(drafted, target, weights, head, greedy_share)
    (found.loss * scale).sum().backward()
    gradient, drafted.grad = drafted.grad, None

    logits = target @ head.T
    best = logits.argmax(-1)
    labels = (1 - greedy_share) * logits.softmax(-1) + greedy_share * F.one_hot(best, VOCAB)
    z = drafted @ head.T
    loss = (-(labels * z.log_softmax(-1)).sum(-1) * weights).sum(1)
    (loss * scale).sum().backward()
    torch.testing.assert_close(found.loss, loss.detach())
    torch.testing.assert_close(gradient, drafted.grad)
    torch.testing.assert_close(found.hits, ((z.argmax(-1) == best) * weights).sum(1))


def brute_force_tree(
    draft: EagleDraft, shared: Shared, tokens: torch.Tensor, hidden: torch.Tensor, shape: TreeShape
) -> list[tuple[float, list[int]]]:
    """All candidates as (probability, path), without keys kept between steps.

    Paths follow their slot's history, as SGLang's keys do; with k = 1 that is the plain chain.
    """
    paths: list[tuple[float, list[int]]] = []
    own, read, score = hidden, tokens, 1.0
    path: list[int] = []
    for _ in range(shape.steps):
        out = chain(draft, shared.embedding, read, own)[-1]
        probabilities = (shared.head @ out).softmax(-1)
        token = int(probabilities.argmax())
        score *= float(probabilities[token])
        path = [*path, token]
        paths.append((score, path))
        read, own = torch.cat((read, torch.tensor([token]))), torch.cat((own, out[None]))
    return paths


@torch.no_grad()
def test_a_chain_is_the_tree_with_one_branch(draft: EagleDraft, shared: Shared) -> None:
    shape = TreeShape(steps=4, topk=1, draft_tokens=5)
    tokens, hidden = torch.randint(VOCAB, (1, 8)), torch.randn(1, 8, 32)
    prefix = read_prefix(draft, shared.embedding, tokens, hidden)
    committed = torch.tensor([6])
    tree = grow(draft, shared, prefix, committed, shape)
    expected = brute_force_tree(draft, shared, tokens[0, :6], hidden[0, :6], shape)
    assert tree.tokens[0].tolist() == expected[-1][1]
    assert tree.parents[0].tolist() == [0, 1, 2, 3]


@torch.no_grad()
def test_first_levels_of_a_wide_tree(draft: EagleDraft, shared: Shared) -> None:
    shape = TreeShape(steps=2, topk=3, draft_tokens=13)
    tokens, hidden = torch.randint(VOCAB, (1, 8)), torch.randn(1, 8, 32)
    prefix = read_prefix(draft, shared.embedding, tokens, hidden)
    tree = grow(draft, shared, prefix, torch.tensor([8]), shape)
    out = chain(draft, shared.embedding, tokens[0], hidden[0])[-1]
    first = (shared.head @ out).softmax(-1).topk(3)
    expected = {(int(t),) for t in first.indices}
    for token in first.indices.tolist():
        read = torch.cat((tokens[0], torch.tensor([token])))
        own = torch.cat((hidden[0], out[None]))
        then = (shared.head @ chain(draft, shared.embedding, read, own)[-1]).topk(3).indices
        expected |= {(token, int(t)) for t in then}
    paths: list[tuple[int, ...]] = [()]
    for token, parent in zip(tree.tokens[0].tolist(), tree.parents[0].tolist(), strict=True):
        paths.append((*paths[parent], token))
    assert set(paths[1:]) == expected


@torch.no_grad()
def test_a_map_only_restricts_the_ids(draft: EagleDraft, shared: Shared) -> None:
    ids = torch.tensor([3, 9, 10, 22, 31, 40, 55, 60])
    reduced = Shared(shared.embedding, shared.head[ids], ids)
    tokens, hidden = torch.randint(VOCAB, (2, 8)), torch.randn(2, 8, 32)
    prefix = read_prefix(draft, shared.embedding, tokens, hidden)
    committed = torch.tensor([5, 8])
    tree = grow(draft, reduced, prefix, committed, TreeShape())
    assert torch.isin(tree.tokens, ids).all()
    everything = Shared(shared.embedding, shared.head, torch.arange(VOCAB))
    for whole in (shared, everything):
        full = grow(draft, whole, prefix, committed, TreeShape())
        assert not torch.isin(full.tokens, ids).all()
    assert torch.equal(full.tokens, grow(draft, shared, prefix, committed, TreeShape()).tokens)


def test_accepted_follows_one_path() -> None:
    from examples.eagle_training.tree import Tree

    #        0
    #   1(a)   2(b)        tokens: a=10 b=20
    #  3(c)   4(c) 5(d)    c=30 d=40;  6 hangs below 4
    tree = Tree(torch.tensor([[10, 20, 30, 30, 40, 50]]), torch.tensor([[0, 0, 1, 2, 2, 4]]))

    def count(*wanted: int) -> int:
        return int(accepted(tree, torch.tensor([[*wanted]]))[0])

    assert count(20, 30, 50, 1) == 3
    assert count(10, 30, 50, 1) == 2
    assert count(10, 40, 50, 1) == 1
    assert count(11, 30, 50, 1) == 0
    assert count(20, 40, -1, -1) == 2
    assert count(-1, -1, -1, -1) == 0


@torch.no_grad()
def test_decoding_equals_generate(target: Any) -> None:
    """More contexts than rows, so rows are used again while others go on."""
    contexts = [torch.randint(8, VOCAB, (n,)).tolist() for n in (3, 9, 1, 5, 7, 4, 2)]
    settings = DecodeSettings(stop_ids=(STOP,), max_length=24, rows=3)
    found = continue_all(target, contexts, [0.0] * len(contexts), settings)
    target.set_attn_implementation("sdpa")
    for context, document in zip(contexts, found, strict=True):
        expected = list(context)
        while len(expected) < 24 and (len(expected) == len(context) or expected[-1] != STOP):
            expected.append(int(target(torch.tensor([expected])).logits[0, -1].argmax()))
        assert document == expected


def test_decoding_out_of_time_keeps_what_is_there(target: Any) -> None:
    contexts = [[9, 10, 11]] * 5
    settings = DecodeSettings(stop_ids=(), max_length=40, rows=2, seconds=-1.0)
    assert continue_all(target, contexts, [0.0] * 5, settings) == [[9], [9], [], [], []]


def test_decoding_refuses_contexts_without_room(target: Any) -> None:
    settings = DecodeSettings(stop_ids=(STOP,), max_length=4, rows=2)
    with pytest.raises(ValueError, match="there is no context"):
        continue_all(target, [], [], settings)
    for context in ([], [1, 2, 3, 4]):
        with pytest.raises(ValueError, match=r"context 1 has \d tokens; 1 to 3 are allowed"):
            continue_all(target, [[1], context], [0.0, 0.0], settings)


def test_sampling_follows_the_distribution_above_min_p() -> None:
    generator = torch.Generator().manual_seed(1)
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log().repeat(20000, 1)
    warm = pick_tokens(logits.clone(), torch.ones(20000), 0.2, generator)
    shares = warm.bincount(minlength=4) / 20000
    # The last token stands below 0.2 times the best one.
    expected = torch.tensor([0.5, 0.3, 0.15, 0.0]) / 0.95
    assert shares[3] == 0
    assert (shares - expected).abs().max() < 5 * (0.25 / 20000) ** 0.5
    cold = pick_tokens(logits.clone(), torch.zeros(20000), 0.2, generator)
    assert (cold == 0).all()


def test_loops_are_found_and_cut() -> None:
    text = list(range(100, 140))
    period = [1, 2, 3, 4, 5]
    replies = [text, [*text, *period * 8], [9] * 40, [*text, *[6] * 20, *text[:5]], []]
    assert loop_starts(replies) == [None, 45, 1, None, None]
    documents = [Document([0, 0, *reply], 2, "chat", True) for reply in replies]
    kept = without_loops(documents)
    assert [len(d.reply) for d in kept] == [40, 45, 65]
    assert all(d.context_length == 2 for d in kept)


def test_documents_and_counts_survive_storage(tmp_path: Path) -> None:
    documents = [
        Document([1, 2, 3, 60], 2, "math", True),
        Document([5, 3], 1, "chat", False),
    ]
    save_documents(documents, tmp_path / "d.safetensors", VOCAB)
    loaded = load_documents(tmp_path / "d.safetensors")
    assert loaded == documents
    counts = reply_counts(loaded, VOCAB)
    assert counts.sum() == 3
    assert (counts[3], counts[60]) == (2, 1)


def no_space(_: int) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_leaves_the_earlier_results(
    draft: EagleDraft, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    documents = tmp_path / "d.safetensors"

    def write() -> None:
        save_documents([Document([1, 2, 3], 1, "own", True)], documents, VOCAB)

    def keep() -> None:
        save_draft(draft, tmp_path)

    for save in (write, keep):
        save()
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert {"d.safetensors", "model.safetensors"} <= set(before)
    monkeypatch.setattr(os, "fsync", no_space)
    for save in (write, keep):
        with pytest.raises(ValueError, match="No space left on device; nothing was changed"):
            save()
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


@torch.no_grad()
def test_padding_changes_no_feature(target: Any) -> None:
    documents = [
        Document(torch.randint(VOCAB, (n,)).tolist(), 3, "chat", True) for n in (5, 64, 65, 30)
    ]
    data = TrainingSet(target, documents)
    seen = []
    for batch in data.epoch(tokens_per_batch=128, seed=0):
        for tokens, features, first, length in zip(*batch, strict=True):
            own = tokens[:length]
            seen.append(own.tolist())
            expected = target_features(target, own[None])[0]
            torch.testing.assert_close(features[:length], expected, rtol=1e-4, atol=1e-4)
            assert first == 2
    assert sorted(seen) == sorted(d.tokens for d in documents)


@torch.no_grad()
def test_accept_lengths_add_up_to_the_reply(target: Any, draft: EagleDraft, shared: Shared) -> None:
    contexts = [torch.randint(8, VOCAB, (n,)).tolist() for n in (3, 9, 5)]
    settings = DecodeSettings(stop_ids=(STOP,), max_length=40, rows=3)
    written = continue_all(target, contexts, [0.0] * 3, settings)
    documents = [
        Document(tokens, len(context), domain, True)
        for tokens, context, domain in zip(written, contexts, ("a", "b", "b"), strict=True)
    ]
    replies = ReplySet(target, documents, reply_tokens=16)
    cycles = accept_lengths(draft, shared, replies, TreeShape())
    for cycle, document in zip(cycles, documents, strict=True):
        tokens = min(16, len(document.reply)) - 1
        assert tokens <= sum(cycle.accept_lengths) <= tokens + TreeShape().steps
    means = mean_by_domain(cycles)
    lengths = [n for c in cycles for n in c.accept_lengths]
    assert means["all"] == pytest.approx(sum(lengths) / len(lengths))
    assert means["a"] == pytest.approx(
        sum(cycles[0].accept_lengths) / len(cycles[0].accept_lengths)
    )


def test_cycles_before_a_limit() -> None:
    cycles = [Cycles("a", [3, 1, 2]), Cycles("a", [4, 4]), Cycles("b", [2])]
    # The first reply's cycles start at its tokens 1, 4 and 5.
    kept = before(cycles, [5, None, 1])
    assert [c.accept_lengths for c in kept] == [[3, 1], [4, 4], []]
    assert mean_by_domain(kept) == {"a": 3.0, "all": 3.0}


def test_draft_folder_has_the_names_that_sglang_loads(draft: EagleDraft, tmp_path: Path) -> None:
    save_draft(draft, tmp_path)
    names = set(load_file(tmp_path / "model.safetensors"))
    assert names == {
        "fc.weight",
        "fc.bias",
        "layers.0.self_attn.q_proj.weight",
        "layers.0.self_attn.k_proj.weight",
        "layers.0.self_attn.v_proj.weight",
        "layers.0.self_attn.o_proj.weight",
        "layers.0.mlp.gate_proj.weight",
        "layers.0.mlp.up_proj.weight",
        "layers.0.mlp.down_proj.weight",
        "layers.0.post_attention_layernorm.weight",
    }
    loaded = load_draft(tmp_path)
    for name, value in draft.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value.to(torch.bfloat16).float()), name


def test_training_lengthens_what_is_accepted(
    target: Any, shared: Shared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A short run on the target's own greedy replies, interrupted and continued."""
    contexts = [torch.randint(8, VOCAB, (6,)).tolist() for _ in range(96)]
    decode = DecodeSettings(stop_ids=(STOP,), max_length=40, rows=96)
    written = continue_all(target, contexts, [0.0] * 96, decode)
    documents = [Document(tokens, 6, "chat", True) for tokens in written if len(tokens) > 10]
    replies = ReplySet(target, documents[:24], reply_tokens=30)
    data = TrainingSet(target, documents)
    settings = TrainSettings(seconds=1e9, learning_rate=2e-2, warmup_batches=5)
    torch.manual_seed(0)
    draft = EagleDraft(DraftConfig.like(target.config))
    rows: list[dict[str, Any]] = []

    def check(current: EagleDraft) -> float:
        return mean_by_domain(accept_lengths(current, shared, replies, TreeShape()))["all"]

    trainer = Trainer(draft, settings, tmp_path, lambda **row: rows.append(row))
    before = check(draft)
    batches = [b for epoch in range(4) for b in data.epoch(tokens_per_batch=256, seed=epoch)]
    parts = [trainer.step(batch, shared) for batch in batches][-1]
    trainer.checkpoint(parts, check, lambda best: save_draft(best, tmp_path))
    assert rows[0]["accept_length"] > before + 0.3
    saved = load_draft(tmp_path)
    assert check(saved) == pytest.approx(rows[0]["accept_length"], abs=0.1)

    fresh = EagleDraft(DraftConfig.like(target.config))
    continued = Trainer(fresh, settings, tmp_path, lambda **row: rows.append(row))
    assert (continued.batches, continued.epoch, continued.best) == (
        trainer.batches,
        1,
        trainer.best,
    )
    assert torch.equal(fresh.fc.weight, draft.fc.weight)

    stored = (tmp_path / "trainer.pt").read_bytes()
    monkeypatch.setattr(os, "fsync", no_space)
    with pytest.raises(ValueError, match="nothing was changed"):
        trainer.checkpoint(parts, lambda _: 0.0, lambda _: None)
    assert (tmp_path / "trainer.pt").read_bytes() == stored
    assert not list(tmp_path.glob(".trainer.pt*"))
