"""What counts as the same answer again, against servers that are made up."""

import itertools

import pytest

from examples.smollm2_135m import sampled_repeats
from examples.smollm2_135m.sampled_repeats import (
    ALONE,
    COMPANY,
    NEIGHBOURS,
    REVERSED,
    ask_in_all_ways,
    compared_log_probabilities,
    repeated_seeds,
)
from examples.smollm2_135m.serving import Reply


def test_every_request_is_asked_in_every_way():
    asked = []

    def ask(batch):
        asked.append(batch)
        return [None if i is None else 10 * i for i in batch]

    found = ask_in_all_ways(COMPANY + 3, ask)
    assert set(map(tuple, found.values())) == {tuple(range(0, 10 * (COMPANY + 3), 10))}
    first = list(range(COMPANY)), [16, 17, 18]
    assert tuple(asked[:4]) == (*first, *first)
    assert asked[4:6] == [batch[::-1] for batch in first]
    assert asked[7] == [None, 16, None, 17, None, 18]
    assert asked[8:] == [[i] for i in range(COMPANY + 3)]


def serve(monkeypatch, reply):
    """Replies of a server: ``reply(batch, place)`` for the seeds of a batch, None if greedy."""

    def sample(url, prompts, samplings):
        seeds = [one.get("sampling_seed") for one in samplings]
        assert [one["temperature"] == 0 for one in samplings] == [s is None for s in seeds]
        return [Reply(reply(seeds, place), "", 0, 0) for place in range(len(seeds))]

    monkeypatch.setattr(sampled_repeats, "sample", sample)
    return repeated_seeds("", [[1], [2], [3]], COMPANY)


def test_a_server_that_keys_by_the_seed_repeats(monkeypatch):
    found = serve(monkeypatch, lambda seeds, place: [seeds[place], 5])
    assert set(found["equal"].values()) == {COMPANY}
    assert found["differences"] == []
    assert found["distinct"] == COMPANY


@pytest.mark.parametrize(
    ("fault", "ways"),
    [
        (lambda seeds, place: [seeds[place], place], {REVERSED, NEIGHBOURS, ALONE}),
        (lambda seeds, place: [seeds[place], len(seeds)], {NEIGHBOURS, ALONE}),
        (lambda seeds, place: [seeds[place], seeds[0] or 0], {REVERSED, NEIGHBOURS, ALONE}),
    ],
    ids=["by row", "by batch size", "by the first row's seed"],
)
def test_a_server_that_keys_by_something_else_does_not(monkeypatch, fault, ways):
    found = serve(monkeypatch, fault)
    differing = {way for way, equal in found["equal"].items() if equal < COMPANY}
    assert differing == ways
    assert {place for _, _, place in found["differences"]} == {1}


def test_a_server_that_counts_its_draws_does_not_repeat(monkeypatch):
    count = itertools.count()
    found = serve(monkeypatch, lambda seeds, place: [next(count)])
    assert set(found["equal"].values()) == {0}


def test_log_probabilities_are_compared_while_tokens_agree():
    found = {
        "first": [[(5, -1.0), (6, -2.0)], [(7, -1.5), (8, -3.0)]],
        "again": [[(5, -1.0), (6, -2.0)], [(7, -1.5), (8, -3.0)]],
        "alone": [[(5, -1.25), (6, -2.0)], [(7, -1.5), (9, -3.5)]],
    }
    compared = compared_log_probabilities(found)
    assert compared["equal"] == {"again": 2, "alone": 0}
    assert compared["largest"] == {"again": 0.0, "alone": 0.25}
