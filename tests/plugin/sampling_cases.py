# ruff: noqa: TID251 (these run where SGLang is)
"""Acceptance and drawn drafts behind SGLang's calls, on the CPU; ``test_round.py`` runs this."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from frspec_kernels.sampling_proposal_reference import draw_children_reference
from frspec_kernels.tree import TreeShape, empty_candidates
from frspec_kernels.tree_reference import grow_tree_reference
from sgl_frspec import sampled_acceptance
from sgl_frspec.drawn_proposals import DrawnProposals, list_size
from sgl_frspec.verify_input import TreeBuilder

V, C, K, S, N, B = 40, 8, 3, 2, 8, 64
SHAPE = TreeShape(K, S, N)
CPU = torch.device("cpu")


def sampling_info(**changed: Any) -> SimpleNamespace:
    """As SGLang describes B requests at temperature 1."""
    plain = {
        "temperatures": torch.ones(B, 1), "top_ks": torch.full((B,), 1 << 30),
        "top_ps": torch.ones(B), "min_ps": torch.zeros(B), "sampling_seed": torch.arange(B) * 7,
        "need_top_k_sampling": False, "need_top_p_sampling": False, "need_min_p_sampling": False,
        "acc_additive_penalties": None, "acc_scaling_penalties": None, "logit_bias": None,
        "is_all_greedy": False,
    }  # fmt: skip
    return SimpleNamespace(**(plain | changed))


def draft_lists(rows: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    best = torch.randn(rows, V, generator=g).softmax(-1).topk(C)
    return best.values, best.indices


def drafted(drawn: DrawnProposals, info: Any, lens: torch.Tensor) -> Any:
    """The tree of a round whose head gives ``draft_lists``, as the worker makes it."""
    candidates = empty_candidates(SHAPE, B, CPU)
    scores, tokens = drawn.begin(info, lens, *draft_lists(B, 0))
    for step in range(S):
        grow_tree_reference(candidates, SHAPE, step, scores, tokens)
        if step < S - 1:
            best = drawn.list_of(step + 1)
            best.probs[: B * K], best.token_ids[: B * K] = draft_lists(B * K, step + 1)
            scores, tokens = drawn.draw(step + 1, B)
    backend = SimpleNamespace(verify_mask=None, max_context_len=100)
    batch = SimpleNamespace(seq_lens=lens, seq_lens_sum=int(lens.sum()))
    found = TreeBuilder(SHAPE, draws=True).build(candidates, torch.zeros(B).long(), batch, backend)
    found.lists = drawn.lists(found.tree)
    return found


@pytest.fixture
def round_() -> tuple[Any, Any, torch.Tensor]:
    info, lens = sampling_info(), torch.arange(B) + 3
    return drafted(DrawnProposals(SHAPE, C, CPU), info, lens), info, lens


def verified(found: Any, info: Any, lens: torch.Tensor, logits: torch.Tensor, mask: Any = None):
    """What ``sample_tree`` gives in place of SGLang's function."""

    def stock(*unused: Any, **also: Any) -> Any:
        raise AssertionError("left to SGLang")

    batch = SimpleNamespace(sampling_info=info, seq_lens=lens, forward_mode=ForwardMode.DECODE)
    output = SimpleNamespace(next_token_logits=logits)
    return sampled_acceptance.sample_tree(stock, found, batch, output, mask)


def thresholds(monkeypatch: pytest.MonkeyPatch, single: float, accumulated: float) -> None:
    spec = SimpleNamespace(
        speculative_accept_threshold_single=single, speculative_accept_threshold_acc=accumulated
    )
    monkeypatch.setattr(sampled_acceptance, "get_spec", lambda: spec)


def test_lists_fit_the_head_and_the_map():
    assert [list_size(k, hot) for k, hot in [(4, 999), (20, 999), (32, 999), (4, 7)]] == [
        32, 40, 64, 7,
    ]  # fmt: skip


def test_drafts_are_those_of_the_reference(round_):
    found, info, lens = round_
    probs, ids = draft_lists(B, 0)
    roots = found.tree.parents == 0
    for b in range(B):
        tokens, _, q = draw_children_reference(
            probs[b], ids[b], 1.0, int(info.sampling_seed[b]), int(lens[b]), 0, 0, K, K - 1
        )
        own = found.tree.tokens[b][roots[b]].tolist()
        assert own == [token for token in tokens if token in own]
        torch.testing.assert_close(found.lists.q[b, 0].double(), q, rtol=1e-5, atol=1e-7)
        drawn = found.tree.tokens[b][roots[b] & (found.lists.drawn[b] == 1)].tolist()
        assert drawn in ([], [tokens[-1]])
    assert 0 < int(found.lists.drawn.sum()) < B * (N - 1)


def test_greedy_requests_draft_what_the_head_found_best():
    info = sampling_info(top_ks=torch.tensor([1, 1 << 30] * (B // 2)))
    found = drafted(DrawnProposals(SHAPE, C, CPU), info, torch.arange(B))
    probs, ids = draft_lists(B, 0)
    candidates = empty_candidates(SHAPE, B, CPU)
    grow_tree_reference(candidates, SHAPE, 0, probs[:, :K], ids[:, :K])
    below, ids_below = draft_lists(B * K, 1)
    grow_tree_reference(candidates, SHAPE, 1, below[:, :K], ids_below[:, :K])
    backend = SimpleNamespace(verify_mask=None, max_context_len=100)
    batch = SimpleNamespace(seq_lens=torch.arange(B), seq_lens_sum=B * (B - 1) // 2)
    alone = TreeBuilder(SHAPE).build(candidates, torch.zeros(B).long(), batch, backend)
    assert torch.equal(found.tree.tokens[::2], alone.tree.tokens[::2])
    assert not torch.equal(found.tree.tokens[1::2], alone.tree.tokens[1::2])


def test_memory_that_graphs_were_captured_with_does_not_move():
    drawn = DrawnProposals(SHAPE, C, CPU)
    drawn.reserve(B + 1)
    before = drawn.list_of(1).probs.data_ptr()
    drawn.begin(sampling_info(), torch.arange(B), *draft_lists(B, 0))
    assert drawn.list_of(1).probs.data_ptr() == before
    drawn.reserve(B - 1)
    with pytest.raises(RuntimeError, match="64 requests in a round, memory for 63"):
        drawn.begin(sampling_info(), torch.arange(B), *draft_lists(B, 0))


def test_a_draft_that_the_target_equals_is_always_accepted(round_, monkeypatch):
    """The target's rows are the draft's lists: no path ends where all children are verified.

    Where a fixed child was not selected, the target has its share left and may say it.
    """
    thresholds(monkeypatch, 1.0, 1.0)
    found, info, lens = round_
    parents = found.tree.parents
    whole = torch.zeros(B, N).scatter_add(1, parents[:, 1:].long(), torch.ones(B, N - 1)) == K
    logits = torch.full((B * N, V), -math.inf)
    for b in range(B):
        for node in range(N):
            row = max(int(found.lists.rows[b, node]), 0)
            logits[b * N + node, found.lists.ids[b, row]] = found.lists.q[b, row].log()
    _, accepted, index = verified(found, info, lens, logits)
    last = index.gather(1, accepted[:, None].long() - 1)[:, 0].long()
    assert not whole.flatten()[last].any()
    on_path = whole.flatten()[index.clamp(min=0).long()] & (index >= 0)
    assert int(on_path.sum()) > B / 2


def test_the_servers_thresholds_are_read_at_each_verification(round_, monkeypatch):
    found, info, lens = round_
    found.lists = None
    logits = torch.randn(B * N, V, generator=torch.Generator().manual_seed(3))
    accepted = {}
    for pair in ((1.0, 1.0), (0.0, 1.0), (1.0, 0.05)):
        thresholds(monkeypatch, *pair)
        accepted[pair] = verified(found, info, lens, logits.clone())[1]
    for b in range(B):  # every first child
        path = [0]
        while int(found.tree.next_token[b, path[-1]]) >= 0:
            path.append(int(found.tree.next_token[b, path[-1]]))
        assert int(accepted[0.0, 1.0][b]) == len(path)
    assert float(accepted[1.0, 1.0].float().mean()) < 1.6
    assert float(accepted[1.0, 0.05].float().mean()) > 1.8


def test_drawn_children_know_no_thresholds(round_, monkeypatch):
    """A server's thresholds can change while it runs; p / q stays exact."""
    found, info, lens = round_
    logits = torch.randn(B * N, V, generator=torch.Generator().manual_seed(3))
    outcomes = []
    for single in (1.0, 0.0):
        thresholds(monkeypatch, single, 1.0)
        outcomes.append(verified(found, info, lens, logits.clone()))
    for one, other in zip(*outcomes, strict=True):
        assert torch.equal(one, other)


def test_penalties_biases_and_grammars_go_into_the_logits(round_, monkeypatch):
    """All but one token forbidden by the mask, that one penalised: it comes out, and nothing else.

    Rows of NaN stand for logits gone wrong: their outcome is the documented one, token 0.
    """
    thresholds(monkeypatch, 1.0, 1.0)
    found, _, lens = round_
    added = torch.zeros(B, V)
    added[:, 9] = -5.0
    bias = torch.zeros(B, V)
    bias[:, 9] = 1.0
    info = sampling_info(
        acc_additive_penalties=added, logit_bias=bias, acc_scaling_penalties=torch.full((B, V), 2.0)
    )

    def forbid(logits: torch.Tensor) -> None:
        expected = torch.where(start + added_rows > 0, (start + added_rows) / 2, 2 * added_start)
        torch.testing.assert_close(logits, expected + bias.repeat_interleave(N, 0))
        keep = torch.zeros(V, dtype=torch.bool)
        keep[9] = True
        logits.masked_fill_(~keep, -math.inf)
        logits[: 2 * N] = math.nan

    start = torch.randn(B * N, V, generator=torch.Generator().manual_seed(3))
    added_rows = added.repeat_interleave(N, 0)
    added_start = start + added_rows
    predicts, accepted, index = verified(
        found, info, lens, start.clone(), SimpleNamespace(apply=forbid)
    )
    for b in range(B):
        path = index[b, : int(accepted[b])].long()
        assert set(predicts[path].tolist()) == {0 if b < 2 else 9}


def test_batches_without_sampled_requests_are_left_to_sglang(round_):
    found, _, lens = round_
    with pytest.raises(AssertionError, match="left to SGLang"):
        verified(found, sampling_info(is_all_greedy=True), lens, torch.zeros(B * N, V))


def test_any_number_is_a_seed() -> None:
    """Releases that do not check seeds let through what does not fit in 64 bits."""
    given = [7, -1, 2**63 - 1, 2**63, 2**64 + 7, -(2**63) - 1, None, "seven"]
    expected = [7, -1, 2**63 - 1, -(2**63), 7, 2**63 - 1]
    reqs = [SimpleNamespace(sampling_params=SimpleNamespace(sampling_seed=own)) for own in given]
    describe = sampled_acceptance._then_seed(lambda *_: SimpleNamespace(sampling_seed=None))
    seeds = describe(object, SimpleNamespace(reqs=reqs, device="cpu")).sampling_seed.tolist()
    assert seeds[:6] == expected
    assert seeds[6] != seeds[7]  # random ones
