"""The rule of docs/sampling.md by enumeration: every draw, every decision, exact sums."""

import itertools
import math
from collections import defaultdict
from collections.abc import Iterator

import pytest
import torch

from frspec_kernels.sampling_reference import (
    Proposal,
    greedy_proposal_acceptance,
    sibling_rule,
    target_distribution,
)

EXACT = 1e-12


def distribution(generator, size, zeros=0.0, peak=1.0):
    logits = peak * torch.randn(size, generator=generator, dtype=torch.float64)
    p = logits.softmax(0)
    p[torch.rand(size, generator=generator) < zeros] = 0
    return p / p.sum() if p.sum() > 0 else torch.full_like(p, 1 / size)


def candidates(q, count):
    ids = torch.sort(q, descending=True, stable=True).indices[:count]
    return ids, q[ids]


def drawn_sequences(proposal, count) -> Iterator[tuple[tuple[int, ...], float]]:
    """Every ordered draw of ``count`` children with its probability."""
    if count == 0:
        yield (), 1.0
        return
    for before, chance in drawn_sequences(proposal, count - 1):
        left = proposal.drawn_from(before)
        for token, q in zip(proposal.ids.tolist(), left.tolist(), strict=True):
            if q > 0:
                yield (*before, token), chance * q


def output_of_node(p, ids, q, fixed, kept, drawn, rule=sibling_rule):
    """Distribution of the node's token over all draws; ``kept`` indexes the verified fixed ones."""
    out = torch.zeros_like(p)
    blank = Proposal(ids, q, fixed, ())
    for sequence, chance in drawn_sequences(blank, drawn):
        children = tuple(int(ids[i]) for i in kept) + sequence
        chances, residual = rule(p, Proposal(ids, q, fixed, children))
        reached = chance
        for token, accept in zip(children, chances, strict=True):
            out[token] += reached * accept
            reached *= 1 - accept
        out += reached * residual
    return out


@pytest.mark.parametrize("seed", range(60))
def test_any_node_reproduces_the_target(seed):
    g = torch.Generator().manual_seed(seed)
    vocab = int(torch.randint(3, 9, (1,), generator=g))
    count = int(torch.randint(1, vocab + 1, (1,), generator=g))
    fixed = int(torch.randint(0, count, (1,), generator=g))
    drawn = min(int(torch.randint(0, 3, (1,), generator=g)), count - fixed)
    p = distribution(g, vocab, zeros=0.3 * (seed % 3), peak=3)
    ids, q = candidates(distribution(g, vocab, peak=2), count)
    for size in range(fixed + 1):
        for kept in itertools.combinations(range(fixed), size):
            out = output_of_node(p, ids, q, fixed, kept, drawn)
            torch.testing.assert_close(out, p, atol=EXACT, rtol=0)


def test_target_mass_entirely_off_the_map():
    p = torch.tensor([0, 0, 0, 0.25, 0.75], dtype=torch.float64)
    q = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    out = output_of_node(p, torch.arange(3), q, 1, (0,), 1)
    torch.testing.assert_close(out, p, atol=EXACT, rtol=0)
    chances, residual = sibling_rule(p, Proposal(torch.arange(3), q, 1, (0, 2)))
    assert chances == [0.0, 0.0]
    assert torch.equal(residual, p)


def test_a_child_without_probability_is_the_lists_next():
    """It is certain, so it is accepted by p, and p without it is left."""
    p = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)
    ids, q = torch.arange(3), torch.tensor([1.0, 0, 0], dtype=torch.float64)
    assert Proposal(ids, q, 1, ()).drawn_from(()).tolist() == [0, 1, 0]
    assert Proposal(ids, q, 1, ()).drawn_from((1,)).tolist() == [0, 0, 1]
    assert Proposal(ids, q, 1, ()).drawn_from((1, 2)).tolist() == [0, 0, 0]
    chances, residual = sibling_rule(p, Proposal(ids, q, 1, (0, 1)))
    assert chances == pytest.approx([0.1, 0.2 / 0.9])
    expected = torch.tensor([0, 0, 3 / 7, 4 / 7], dtype=torch.float64)
    torch.testing.assert_close(residual, expected, atol=EXACT, rtol=0)
    for drawn in (1, 2):
        out = output_of_node(p, ids, q, 1, (0,), drawn)
        torch.testing.assert_close(out, p, atol=EXACT, rtol=0)


def test_a_perfect_draft_is_always_accepted():
    p = distribution(torch.Generator().manual_seed(1), 6)
    ids, q = candidates(p, 6)
    for fixed in range(5):
        blank = Proposal(ids, q, fixed, ())
        for drawn, _ in drawn_sequences(blank, 1):
            children = (*ids[:fixed].tolist(), *drawn)
            chances, _ = sibling_rule(p, Proposal(ids, q, fixed, children))
            assert chances[-1] == pytest.approx(1, abs=1e-9)
        assert greedy_proposal_acceptance(p, p, fixed) == pytest.approx(1)


def test_a_point_mass_draft():
    p = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64)
    one = torch.ones(1, dtype=torch.float64)
    chances, residual = sibling_rule(p, Proposal(torch.tensor([2]), one, 0, (2,)))
    assert chances == [pytest.approx(0.3)]
    expected = torch.tensor([2 / 7, 5 / 7, 0], dtype=torch.float64)
    torch.testing.assert_close(residual, expected, atol=EXACT, rtol=0)


@pytest.mark.parametrize("seed", range(20))
def test_acceptance_formula_and_the_gain_over_fixed_children(seed):
    g = torch.Generator().manual_seed(seed)
    p, q = distribution(g, 7, peak=2), distribution(g, 7, peak=2)
    ids, listed = candidates(q, 7)
    for fixed in range(6):
        out = 0.0
        for sequence, chance in drawn_sequences(Proposal(ids, listed, fixed, ()), 1):
            children = (*ids[:fixed].tolist(), *sequence)
            chances, _ = sibling_rule(p, Proposal(ids, listed, fixed, children))
            out += chance * (1 - math.prod(1 - a for a in chances))
        assert out == pytest.approx(greedy_proposal_acceptance(p, q, fixed), abs=1e-9)


def test_only_fixed_children_accept_as_often_as_the_target_only_rule():
    p = distribution(torch.Generator().manual_seed(3), 6)
    ids, q = candidates(distribution(torch.Generator().manual_seed(4), 6), 4)
    chances, _ = sibling_rule(p, Proposal(ids, q, 4, tuple(ids.tolist())))
    assert 1 - math.prod(1 - a for a in chances) == pytest.approx(float(p[ids].sum()))


# A tree of two levels: every path's probability, over all draws and all decisions.


def context_distributions(generator, vocab, peak):
    """A distribution for the empty context and one for each first token."""
    return {
        context: distribution(generator, vocab, peak=peak)
        for context in [(), *((t,) for t in range(vocab))]
    }


def two_level_output(p, q, count, fixed, nodes, score_by_value=False):
    """Distribution over (first, second) tokens of a cycle that verifies the best ``nodes``.

    One child is drawn at the root and one at each child of the root. Positions that a cycle does
    not decide follow the target.
    """
    ids, listed = {}, {}
    for context in q:
        ids[context], listed[context] = candidates(q[context], count)
    out = defaultdict(float)
    blank = Proposal(ids[()], listed[()], fixed, ())
    for root_drawn, root_chance in drawn_sequences(blank, 1):
        firsts = (*ids[()][:fixed].tolist(), *root_drawn)
        first_q = [float(q[()][t]) for t in firsts]
        second_draws = [
            list(drawn_sequences(Proposal(ids[(t,)], listed[(t,)], fixed, ()), 1)) for t in firsts
        ]
        for combination in itertools.product(*second_draws):
            chance = root_chance * math.prod(c for _, c in combination)
            places = []
            drawn_q = first_q[fixed] if score_by_value else float(listed[()][fixed:].sum())
            for i, token in enumerate(firsts):
                score = first_q[i] if i < fixed else drawn_q
                places.append((-score, len(places), (), token))
            for i, token in enumerate(firsts):
                second = combination[i][0][0]
                context = (token,)
                scores = [float(x) for x in listed[context][:fixed]]
                scores.append(
                    float(q[context][second])
                    if score_by_value
                    else float(listed[context][fixed:].sum())
                )
                seconds = (*ids[context][:fixed].tolist(), second)
                for s, child in zip(scores, seconds, strict=True):
                    places.append((-first_q[i] * s, len(places), context, child))
            chosen = sorted(places)[:nodes]
            children = defaultdict(list)
            for _, _, context, token in sorted(chosen, key=lambda place: place[1]):
                children[context].append(token)
            _add_outcomes(out, chance, p, ids, listed, fixed, children)
    return out


def _add_outcomes(out, chance, p, ids, listed, fixed, children):
    root = Proposal(ids[()], listed[()], fixed, tuple(children[()]))
    chances, residual = sibling_rule(p[()], root)
    reached = chance
    for token, accept in zip(root.children, chances, strict=True):
        below = Proposal(ids[(token,)], listed[(token,)], fixed, tuple(children[(token,)]))
        second_chances, second_residual = sibling_rule(p[(token,)], below)
        here = reached * accept
        for second, second_accept in zip(below.children, second_chances, strict=True):
            out[token, second] += here * second_accept
            here *= 1 - second_accept
        for second, r in enumerate(second_residual.tolist()):
            out[token, second] += here * r
        reached *= 1 - accept
    for token, r in enumerate(residual.tolist()):
        for second, later in enumerate(p[(token,)].tolist()):
            out[token, second] += reached * r * later


def joint(p, vocab):
    return {(a, b): float(p[()][a] * p[(a,)][b]) for a in range(vocab) for b in range(vocab)}


def largest_error(out, expected):
    return max(abs(out[key] - value) for key, value in expected.items())


@pytest.mark.parametrize("nodes", [1, 2, 3, 4, 5, 6])
@pytest.mark.parametrize("seed", range(4))
def test_a_selected_tree_reproduces_the_target(seed, nodes):
    g = torch.Generator().manual_seed(seed)
    vocab = 4
    p = context_distributions(g, vocab, peak=1.5)
    q = context_distributions(g, vocab, peak=1.5)
    out = two_level_output(p, q, count=3, fixed=1, nodes=nodes)
    assert largest_error(out, joint(p, vocab)) < EXACT


def off_the_map(g, vocab):
    """Nothing that the target can say is in the map."""
    p = context_distributions(g, vocab, peak=1.5)
    q = context_distributions(g, vocab, peak=1.5)
    for x in p.values():
        x[:2] = 0
        x /= x.sum()
    for x in q.values():
        x[2:] = 0
        x /= x.sum()
    return p, q, 2


def the_same(g, vocab):
    p = context_distributions(g, vocab, peak=1.5)
    return p, p, vocab


def a_point_mass(g, vocab):
    p = context_distributions(g, vocab, peak=1.5)
    q = {context: (x == x.max()).double() for context, x in p.items()}
    for context in list(q)[::2]:  # on a token that the target does not favour
        q[context] = q[context].roll(1)
    return p, q, 1


def filtered(g, vocab, **filters):
    """The target's own filters; the map is the first tokens, of an independent draft."""
    p = {
        context: target_distribution(1.5 * torch.randn(vocab, generator=g).double(), **filters)
        for context in [(), *((t,) for t in range(vocab))]
    }
    q = context_distributions(g, vocab, peak=1.5)
    for x in q.values():
        x[3:] = 0
        x /= x.sum()
    return p, q, 3


def one_token(g, vocab):
    p, q, _ = filtered(g, vocab)
    for x in q.values():
        x[1:] = 0
        x /= x.sum()
    return p, q, 1


def a_certain_draft(g, vocab):
    """All but its best one or two candidates have no probability left: underflow at a low T."""
    p, q, count = filtered(g, vocab)
    for place, (context, x) in enumerate(q.items()):
        best = x.topk(1 + place % 2)
        q[context] = torch.zeros_like(x).scatter(0, best.indices, best.values / best.values.sum())
    return p, q, count


FAMILIES = {
    "a certain draft": a_certain_draft,
    "mass off the map": off_the_map,
    "q = p": the_same,
    "a point mass": a_point_mass,
    "cold": lambda g, vocab: filtered(g, vocab, temperature=0.02),
    "greedy": lambda g, vocab: filtered(g, vocab, temperature=0.0),
    "a map of one token": one_token,
    "top-p through the map": lambda g, vocab: filtered(g, vocab, top_p=0.6),
    "all filters": lambda g, vocab: filtered(
        g, vocab, temperature=0.8, top_k=4, top_p=0.8, min_p=0.1
    ),
}


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("family", FAMILIES)
def test_trees_of_every_kind_reproduce_the_target(family, seed):
    """270 random targets, drafts, maps and trees."""
    g = torch.Generator().manual_seed(1000 + seed)
    vocab = 5
    p, q, count = FAMILIES[family](g, vocab)
    fixed = int(torch.randint(0, count, (1,), generator=g))
    nodes = int(torch.randint(1, (fixed + 1) * (fixed + 2) + 1, (1,), generator=g))
    out = two_level_output(p, q, count=count, fixed=fixed, nodes=nodes)
    assert largest_error(out, joint(p, vocab)) < EXACT


def test_selecting_by_drawn_values_would_be_wrong():
    """The trap that the scores avoid: the enumeration notices it."""
    g = torch.Generator().manual_seed(1)
    p = context_distributions(g, 4, peak=1.5)
    q = context_distributions(g, 4, peak=0.7)
    out = two_level_output(p, q, count=3, fixed=1, nodes=2, score_by_value=True)
    assert largest_error(out, joint(p, 4)) > 1e-3


# Mutations: each changes one line of the rule, and the enumeration must notice.


def forget_the_residual(p, proposal):
    chances, _ = sibling_rule(p, proposal)
    return chances, p


def normalise_over_the_map_only(p, proposal):
    on_map = torch.zeros_like(p)
    on_map[proposal.ids] = p[proposal.ids]
    return sibling_rule(on_map / on_map.sum(), proposal)


def skip_a_sibling(p, proposal):
    shorter = Proposal(proposal.ids, proposal.q, proposal.fixed, proposal.children[1:])
    chances, residual = sibling_rule(p, shorter)
    return [0.0, *chances], residual


def keep_rejected_in_q(p, proposal):
    """Treat drawn siblings as drawn with replacement."""
    chances, left = [], p
    for token in proposal.children:
        dense = torch.zeros_like(p)
        dense[proposal.ids] = proposal.drawn_from(())
        chances.append(min(1.0, float(left[token] / dense[token])))
        rest = (left - dense).clamp(min=0)
        left = rest / rest.sum() if rest.sum() > 0 else rest
    return chances, left


@pytest.mark.parametrize(
    "rule", [forget_the_residual, normalise_over_the_map_only, skip_a_sibling, keep_rejected_in_q]
)
def test_wrong_rules_are_noticed(rule):
    g = torch.Generator().manual_seed(5)
    p = distribution(g, 6)
    ids, q = candidates(distribution(g, 6), 4)
    right = output_of_node(p, ids, q, 0, (), 2)
    assert float((right - p).abs().max()) < EXACT
    wrong = output_of_node(p, ids, q, 0, (), 2, rule=rule)
    assert float((wrong - p).abs().max()) > 1e-3


# The target's distribution.


def plain_filter(logits, temperature, top_k, top_p, min_p):
    """The definition with Python floats and lists."""
    best = max(logits)
    weights = [math.exp((x - best) / temperature) for x in logits]
    order = sorted(range(len(logits)), key=lambda i: (-weights[i], i))
    kept = order[: top_k or len(order)]
    total = sum(weights[i] for i in kept)
    cumulative, within = 0.0, []
    for i in kept:
        if top_p < 1 and cumulative >= top_p:
            break
        within.append(i)
        cumulative += weights[i] / total
    within = [i for i in within if weights[i] >= min_p * weights[order[0]]]
    total = sum(weights[i] for i in within)
    return [weights[i] / total if i in within else 0.0 for i in range(len(logits))]


@pytest.mark.parametrize("seed", range(40))
def test_target_distribution_follows_the_definition(seed):
    g = torch.Generator().manual_seed(seed)
    logits = (3 * torch.randn(12, generator=g, dtype=torch.float64)).round(decimals=seed % 3)
    temperature = [0.3, 0.7, 1.0, 2.5][seed % 4]
    top_k = [None, 1, 4, 11][seed // 4 % 4]
    top_p = [1.0, 0.9, 0.35][seed % 3]
    min_p = [0.0, 0.05, 0.4][seed // 3 % 3]
    p = target_distribution(logits, temperature, top_k, top_p, min_p)
    expected = plain_filter(logits.tolist(), temperature, top_k, top_p, min_p)
    torch.testing.assert_close(p, torch.tensor(expected, dtype=p.dtype), atol=1e-12, rtol=0)


def test_ties_at_the_boundary_keep_the_smaller_id():
    logits = torch.zeros(4, dtype=torch.float64)
    assert target_distribution(logits, top_k=2).tolist() == [0.5, 0.5, 0, 0]
    assert target_distribution(logits, top_p=0.6).tolist() == pytest.approx([1 / 3] * 3 + [0])


@pytest.mark.parametrize(
    ("row", "winner"),
    [
        ([math.nan, 1.0, math.nan], 1),
        ([1.0, math.inf, math.inf], 1),
        ([-math.inf] * 3, 0),
        ([math.nan] * 3, 0),
        ([-math.inf, -math.inf, 2.0], 2),
    ],
)
def test_odd_rows_have_their_documented_outcome(row, winner):
    p = target_distribution(torch.tensor(row, dtype=torch.float64), 0.8, 3, 0.9, 0.1)
    assert p.tolist() == [float(i == winner) for i in range(3)]


@pytest.mark.parametrize("temperature", [0.0, 1e-320, 1e-9])
def test_cold_rows_are_greedy(temperature):
    logits = torch.tensor([1.0, 3.0, 3.0, -2.0], dtype=torch.float64)
    p = target_distribution(logits, temperature)
    expected = [0, 1, 0, 0] if temperature == 0 else [0, 0.5, 0.5, 0]
    assert p.tolist() == expected


def test_an_infinite_temperature_is_uniform_over_what_is_finite():
    logits = torch.tensor([5.0, -math.inf, math.nan, -3.0, 0.0, 1.0], dtype=torch.float64)
    assert target_distribution(logits, math.inf).tolist() == [0.25, 0, 0, 0.25, 0.25, 0.25]
    # The order of the logits still decides what is kept.
    assert target_distribution(logits, math.inf, top_p=0.5).tolist() == [0.5, 0, 0, 0, 0, 0.5]
