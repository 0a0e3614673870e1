"""Acceptance at temperature > 0: the kernels equal the reference wherever float32 can tell."""

import math

import pytest
import torch

from frspec_kernels import sampling_launch, sampling_random_reference
from frspec_kernels.sampling import (
    DraftLists,
    Sampling,
    accept_sampled,
    allocate_sampling_workspace,
)
from frspec_kernels.sampling_proposal import draw_children
from frspec_kernels.sampling_tree_reference import Thresholds
from tests.kernels.sampling_problem import (
    DEVICE,
    Problem,
    assert_outcomes,
    changed,
    problem,
    run,
    with_lists,
)
from tests.kernels.tree_oracle import poison

ON_GPU = DEVICE == "cuda"
SEEDS = range(20 if ON_GPU else 1)
# Compiled kernels are quick; the interpreter is not.
BATCH, NODES, VOCAB = (96, 24, 5000) if ON_GPU else (8, 7, 300)


def levels_only(monkeypatch):
    monkeypatch.setattr(sampling_launch, "ALL_ROWS_LIMIT", 0)


def test_philox_known_answers():
    """From the authors' test vectors (Random123, kat_vectors)."""
    most = 0xFFFFFFFF
    zero, ones = torch.zeros(1, dtype=torch.int64), torch.full((1,), most)
    got = sampling_random_reference.philox((zero, zero, zero, zero), (0, 0)).flatten().tolist()
    assert got == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    got = (
        sampling_random_reference.philox((ones, ones, ones, ones), (most, most)).flatten().tolist()
    )
    assert got == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]


@pytest.mark.parametrize("seed", SEEDS)
def test_fixed_children(seed, monkeypatch):
    levels_only(monkeypatch)
    p = problem(BATCH, NODES, VOCAB, 4, seed).on(DEVICE)
    paths = assert_outcomes(p, run(p))
    assert max(len(path.nodes) for path in paths) > 1


@pytest.mark.parametrize("seed", SEEDS)
def test_drawn_children(seed, monkeypatch):
    levels_only(monkeypatch)
    p = with_lists(problem(BATCH, NODES, VOCAB, 4, seed), 16, 2, seed).on(DEVICE)
    paths = assert_outcomes(p, run(p))
    assert max(len(path.nodes) for path in paths) > 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rows_at_once_and_level_by_level_agree_bit_for_bit(dtype, monkeypatch):
    batch = BATCH if ON_GPU else 3
    p = with_lists(problem(batch, 5, VOCAB, 3, 3, dtype=dtype), 8, 1, 3).on(DEVICE)
    slots = torch.randperm(5000)[: batch * 5].to(DEVICE)
    at_once = run(p, slots=slots)
    assert_outcomes(p, at_once)
    levels_only(monkeypatch)
    for a, b in zip(at_once, run(p, slots=slots), strict=True):
        assert a is not None
        assert b is not None
        assert torch.equal(a, b)
    base = torch.arange(batch, device=DEVICE)[:, None] * 5
    index, front = at_once.accept_index, base + torch.arange(4, device=DEVICE)
    source = torch.where(index >= 0, index, front)
    torch.testing.assert_close(at_once.target_slots, slots[front], rtol=0, atol=0)
    torch.testing.assert_close(at_once.source_slots, slots[source], rtol=0, atol=0)


@pytest.mark.parametrize("peak", [0.2, 2.0])
def test_a_list_that_is_shortened_gives_the_same_bits(peak, monkeypatch):
    """Flat rows, whose lists are long, under every way to truncate; a threshold of 16 keys."""
    kinds = [
        (1.0, 0, 0.95, 0.0), (3.0, 0, 0.6, 0.0), (1.0, 200, 0.9, 0.0), (2.0, 0, 0.9, 0.3),
        (1.0, 0, 1.0, 0.1), (1.0, 120, 0.3, 0.6), (1.0, 7, 1.0, 0.0), (0.5, 0, 0.05, 0.0),
    ]  # fmt: skip
    p = problem(BATCH, 3, VOCAB, 2, 31, kinds=kinds, peak=peak).on(DEVICE)
    outcomes = []
    for shrink_from in (1 << 20, 16):
        monkeypatch.setattr(sampling_launch, "SHRINK_FROM", shrink_from)
        memory = poison(allocate_sampling_workspace(BATCH, 3, VOCAB, p.max_path, DEVICE))
        outcomes.append((run(p, workspace=memory), memory.pivots))
    whole, pivots = outcomes[0]
    assert_outcomes(p, whole)
    assert torch.equal(pivots, outcomes[1][1])
    for a, b in zip(whole[:6], outcomes[1][0][:6], strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("kind", [(1.0, 250, 0.9, 0.5), (1.0, 40, 0.8, 0.02)])
def test_every_filter_moves_the_chance_of_a_child(kind):
    """Two filters, of which one cuts much more: the chances are of what both leave."""
    p = problem(24, 2, 300, 1, 41, kinds=[kind]).on(DEVICE)
    paths = assert_outcomes(p, run(p))
    assert max(len(path.nodes) for path in paths) == 2


def test_a_request_repeats_whatever_is_around_it(monkeypatch):
    levels_only(monkeypatch)
    p = problem(BATCH, NODES, VOCAB, 4, 7).on(DEVICE)
    together = run(p)
    for b in range(0, BATCH, 3):
        rows = slice(b * NODES, (b + 1) * NODES)
        one = slice(b, b + 1)
        alone = accept_sampled(
            p.logits[rows], p.tokens[one], p.parents[one], p.seq_lens[one], p.max_path,
            changed(p.sampling, lambda x, one=one: x[one]),
        )  # fmt: skip
        assert torch.equal(alone.path_tokens[0], together.path_tokens[b])
        assert int(alone.accept_lens[0]) == int(together.accept_lens[b])


@pytest.mark.parametrize("limit", [0, 1 << 40], ids=["levels", "all rows"])
def test_an_order_of_requests_is_an_order_of_outcomes(limit, monkeypatch):
    """The same rows in another order: drawn children, every bit of what was decided."""
    monkeypatch.setattr(sampling_launch, "ALL_ROWS_LIMIT", limit)
    p = with_lists(problem(BATCH, NODES, VOCAB, 3, 27), 12, 2, 28).on(DEVICE)
    order = torch.randperm(BATCH, generator=torch.Generator().manual_seed(29)).to(DEVICE)
    assert p.lists is not None
    drawn, rows, ids, q, fixed = p.lists
    logits = p.logits.view(BATCH, NODES, VOCAB)[order].view(BATCH * NODES, VOCAB)
    turned = Problem(
        logits, p.tokens[order], p.parents[order], p.seq_lens[order], p.max_path,
        changed(p.sampling, lambda x: x[order]),
        DraftLists(drawn[order], rows[order], ids[order], q[order].contiguous(), fixed),
    )  # fmt: skip
    first, second = run(p), run(turned)
    assert int(first.accept_lens.max()) > 1
    assert torch.equal(second.path_tokens, first.path_tokens[order])
    assert torch.equal(second.accept_lens, first.accept_lens[order])


def test_without_truncation_nothing_is_collected():
    kinds = [(1.0, 0, 1.0, 0.0), (0.6, 0, 1.0, 0.0), (1.0, 1, 1.0, 0.0), (0.0, 0, 1.0, 0.0)]
    p = problem(4, 5, VOCAB, 3, 5, kinds=kinds, truncates=False).on(DEVICE)
    memory = allocate_sampling_workspace(4, 5, VOCAB, p.max_path, DEVICE, truncates=False)
    assert memory.candidates.numel() == 0
    assert_outcomes(p, run(p, workspace=poison(memory)))


@pytest.mark.parametrize("thresholds", [(0.3, 1.0), (1.0, 0.4), (0.5, 0.7), (0.0, 1.0)])
def test_thresholds(thresholds, monkeypatch):
    levels_only(monkeypatch)
    p = problem(BATCH, NODES, VOCAB, 4, 11).on(DEVICE)
    single, accumulated = thresholds
    got = run(p, threshold_single=single, threshold_acc=accumulated)
    assert_outcomes(p, got, Thresholds(single, accumulated))


@pytest.mark.parametrize(("likely", "scale"), [(0, 0.0), (1, 0.0), (0, 1e-34), (1, 1e-34)])
def test_lists_with_little_to_draw_from(likely, scale, monkeypatch):
    """Behind the fixed candidates and ``likely`` more: no probability, or hardly any.

    The drawn children are the next candidates in the list's order, as the draw has it.
    """
    levels_only(monkeypatch)
    fixed = 2
    p = with_lists(problem(BATCH, NODES, VOCAB, 4, 5), 16, fixed, 5)
    assert p.lists is not None
    p.lists.q[:, :, fixed + likely :] *= scale
    places = {}
    for b, n in p.lists.drawn.nonzero().tolist():
        parent = int(p.parents[b, n])
        places[b, parent] = places.get((b, parent), fixed - 1) + 1
        row = int(p.lists.rows[b, parent])
        p.tokens[b, n] = p.lists.ids[b, row, places[b, parent]]
    assert {fixed, fixed + 1} <= set(places.values())
    p = p.on(DEVICE)
    paths = assert_outcomes(p, run(p))
    assert max(len(path.nodes) for path in paths) > 1


def test_a_cold_draft_takes_nothing_from_a_target_that_differs():
    """At T = 0.05 all but the best candidate of the draft underflow; token 20 is the target's.

    Of 64 replies one in 350 runs would have another: p(20) = 0.99995.
    """
    batch, width = 64, 8
    probs = torch.tensor([0.999, *(1e-4 * 0.5**i for i in range(width - 1))])
    probs = probs.expand(batch, -1).contiguous().to(DEVICE)
    ids = torch.arange(width, device=DEVICE).expand(batch, -1).contiguous()
    cold = torch.full((batch,), 0.05, device=DEVICE)
    seeds, lens = torch.arange(batch, device=DEVICE), torch.full((batch,), 10, device=DEVICE)
    children = draw_children(probs, ids, cold, seeds, lens, 0, children=2, fixed=1)
    tokens = torch.cat([lens[:, None] * 0, children.token_ids], 1)
    logits = torch.zeros(batch * 3, 32, device=DEVICE)
    logits[:, 1:width], logits[:, 20] = 0.2, 0.8

    def each(row, dtype=torch.int32):
        return torch.tensor([row], dtype=dtype, device=DEVICE).expand(batch, -1).contiguous()

    lists = DraftLists(
        each([0, 0, 1], torch.int8), each([0, -1, -1]), ids[:, None], children.q[:, None], 1
    )
    none = torch.zeros_like(cold)
    sampling = Sampling(cold, none.int(), none + 1, none, seeds, truncates=False)
    got = accept_sampled(logits, tokens, each([-1, 0, 0]), lens, 2, sampling, lists=lists)
    assert got.path_tokens[:, 0].tolist() == [20] * batch


ODD_ROWS = {
    "nan": lambda row: row.fill_(math.nan),
    "some nan": lambda row: row[::2].fill_(math.nan),
    "minus infinity": lambda row: row.fill_(-math.inf),
    "one token left": lambda row: row[torch.arange(len(row)) != 77].fill_(-math.inf),
    "most tokens gone": lambda row: row[10:].fill_(-math.inf),
    "plus infinities": lambda row: row[[40, 200]].fill_(math.inf),
    "all equal": lambda row: row.fill_(1.5),
    "few levels": lambda row: row.round_(),
    "huge": lambda row: row.mul_(1e30),
    "tiny": lambda row: row.mul_(1e-30),
}


@pytest.mark.parametrize("name", ODD_ROWS)
def test_odd_rows(name, monkeypatch):
    levels_only(monkeypatch)
    p = problem(8, 3, 300, 2, 13)
    for row in p.logits:
        ODD_ROWS[name](row)
    assert_outcomes(p.on(DEVICE), run(p.on(DEVICE)), unclear=0.3)


@pytest.mark.parametrize("top_p", [0.25, 0.5, 0.75])
@pytest.mark.parametrize("top_k", [0, 6])
def test_ties_at_the_boundary_keep_the_smaller_id(top_p, top_k):
    """Eight equal logits (six with top-k) among minus infinities: the first ones are kept."""
    batch = 256 if ON_GPU else 6
    logits = torch.full((batch * 2, 300), -math.inf)
    held = torch.arange(8) * 37 + 3
    logits[:, held] = 2.0
    kept = held[: math.ceil((top_k or 8) * top_p)]
    tokens = torch.tensor([[0, 299]]).expand(batch, 2).contiguous()
    parents = torch.tensor([[-1, 0]], dtype=torch.int32).expand(batch, 2).contiguous()
    sampling = Sampling(
        torch.ones(batch), torch.full((batch,), top_k, dtype=torch.int32),
        torch.full((batch,), top_p), torch.zeros(batch), torch.arange(batch),
    )  # fmt: skip
    lens = torch.arange(batch)
    p = Problem(logits, tokens, parents, lens, 2, sampling, None)
    got = run(p.on(DEVICE))
    assert_outcomes(p, got)
    assert (got.accept_lens == 1).all()
    drawn = set(got.bonus_tokens.tolist())
    assert drawn <= set(kept.tolist())
    assert not ON_GPU or drawn == set(kept.tolist())


def test_a_min_p_of_one_shares_the_mass_among_the_best():
    """Four equal logits, of which the draft proposes one: accepted by a quarter."""
    batch = 200 if ON_GPU else 24
    logits = torch.full((batch * 2, 300), -1.0)
    logits[:, torch.arange(4) * 50 + 9] = 2.0
    tokens = torch.tensor([[0, 59]]).expand(batch, 2).contiguous()
    parents = torch.tensor([[-1, 0]], dtype=torch.int32).expand(batch, 2).contiguous()
    one = torch.ones(batch)
    sampling = Sampling(one, torch.zeros(batch).int(), one, one, torch.arange(batch))
    p = Problem(logits, tokens, parents, torch.arange(batch), 2, sampling, None)
    paths = assert_outcomes(p.on(DEVICE), run(p.on(DEVICE)))
    assert {len(path.nodes) for path in paths} == {1, 2}


def test_greedy_requests_take_the_best_token():
    kinds = [(1.0, 1, 1.0, 0.0), (0.0, 0, 0.5, 0.0), (1e-40, 4, 1.0, 0.0)]
    p = problem(6, 4, 300, 2, 17, kinds=kinds)
    p.logits.round_()
    best = p.logits.argmax(-1).view(6, 4)
    got = run(p.on(DEVICE))
    for b in range(6):
        node, said = 0, []
        while node >= 0:
            said.append(int(best[b, node]))
            children = [c for c in range(1, 4) if p.parents[b, c] == node]
            node = next((c for c in children if p.tokens[b, c] == said[-1]), -1)
        assert got.path_tokens[b, : len(said)].tolist() == said
        assert int(got.accept_lens[b]) == len(said)


def test_an_infinite_temperature_is_not_greedy():
    """A request's 1e39 is infinite as float32: what is kept of four finite logits is as likely."""
    settings = [(0, 1.0, 4), (0, 0.5, 2), (3, 1.0, 3)]
    each = 200 if ON_GPU else 4
    top_k, top_p, kept = (torch.tensor(x * each) for x in zip(*settings, strict=True))
    batch = len(kept)
    logits = torch.full((batch * 2, 300), -math.inf)
    held = torch.tensor([140, 9, 299, 77])
    logits[:, held] = torch.tensor([60.0, 3.0, -1e4, -1e30])
    tokens = torch.tensor([[0, 9]]).expand(batch, 2).contiguous()
    parents = torch.tensor([[-1, 0]], dtype=torch.int32).expand(batch, 2).contiguous()
    hot, seeds = torch.tensor([1e39] * batch), torch.arange(batch)
    sampling = Sampling(hot, top_k.int(), top_p, torch.zeros(batch), seeds)
    p = Problem(logits, tokens, parents, seeds, 2, sampling, None)
    got = run(p.on(DEVICE))
    assert_outcomes(p, got)
    first = [held.tolist().index(token) for token in got.path_tokens[:, 0].tolist()]
    assert all(rank < count for rank, count in zip(first, kept.tolist(), strict=True))
    assert len({*first}) >= 3


def test_an_empty_batch():
    p = problem(1, 3, 50, 2, 1)
    logits, tokens, parents, lens = (x[:0].to(DEVICE) for x in p[:4])
    sampling = changed(p.sampling, lambda x: x[:0].to(DEVICE))
    out = accept_sampled(logits, tokens, parents, lens, p.max_path, sampling)
    assert out.accept_index.shape == (0, 3)


def replaced(p, **changes):
    return p._replace(sampling=p.sampling._replace(**changes))


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (lambda p: p._replace(logits=p.logits.double()), TypeError, "float64"),
        (lambda p: p._replace(logits=p.logits[:-1]), ValueError, r"logits are \[6, V\]"),
        (lambda p: p._replace(max_path=0), ValueError, "max_path"),
        (lambda p: replaced(p, top_ks=p.sampling.top_ks.long()), TypeError, "sampling.top_ks"),
        (lambda p: replaced(p, seeds=p.sampling.seeds[:1]), ValueError, "sampling.seeds"),
    ],
)
def test_arguments_that_do_not_fit(change, error, words):
    with pytest.raises(error, match=words):
        accept_sampled(*change(problem(2, 3, 50, 2, 1)).arguments)


@pytest.mark.parametrize("columns", [0, 1 << 23])
def test_vocabularies_whose_mass_does_not_fit(columns):
    p = problem(2, 3, 50, 2, 1)
    p = p._replace(logits=torch.zeros(columns).expand(6, columns))
    with pytest.raises(ValueError, match=f"2\\^23 - 1 columns, got {columns}$"):
        accept_sampled(*p.arguments)


def test_thresholds_and_lists_that_do_not_fit():
    p = with_lists(problem(2, 3, 50, 2, 1), 8, 1, 1)
    with pytest.raises(ValueError, match="threshold_acc in"):
        accept_sampled(*p.arguments, threshold_acc=0.0)
    with pytest.raises(ValueError, match="leave both thresholds at 1"):
        accept_sampled(*p.arguments, lists=p.lists, threshold_single=0.5)
    assert p.lists is not None
    wide = p.lists._replace(fixed=8)
    with pytest.raises(ValueError, match=r"lists.fixed is in \[0, 8\)"):
        accept_sampled(*p.arguments, lists=wide)
    short = allocate_sampling_workspace(2, 3, 49, 3, "cpu", list_size=8)
    with pytest.raises(ValueError, match=r"workspace\.candidates"):
        accept_sampled(*p.arguments, lists=p.lists, workspace=short)
