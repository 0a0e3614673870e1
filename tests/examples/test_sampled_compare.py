"""The comparison of sampled replies: alike, different, and its accept lengths."""

import json
import sys

import pytest
import torch

from examples.smollm2_135m import sampled_compare
from examples.smollm2_135m.sampled_arm import ARMS, SETTINGS, drafting_flags
from examples.smollm2_135m.sampled_compare import (
    accept_length,
    accept_table,
    comparisons,
    marginal,
    together,
)


def replies(generator, count, shift=0.0):
    """Counts of three tokens each; ``shift`` moves the second token's mass to token 0."""
    p = torch.tensor([0.4, 0.3, 0.2, 0.1], dtype=torch.float64)
    second = (1 - shift) * p + shift * torch.tensor([1.0, 0, 0, 0], dtype=torch.float64)
    found = {}
    drawn = [torch.multinomial(x, count, True, generator=generator) for x in (p, second, p)]
    for reply in zip(*(tokens.tolist() for tokens in drawn), strict=True):
        key = ",".join(map(str, reply))
        found[key] = found.get(key, 0) + 1
    return found


def arm(name, generator, shift=0.0, **more):
    counts = {setting: [replies(generator, 2000, shift) for _ in range(2)] for setting in SETTINGS}
    return {"arm": name, "map_size": 32768, "random_seed": 1, "counts": counts, **more}


def compare(folder, monkeypatch, *arms):
    for one in arms:
        (folder / f"{one['arm']}-32768.json").write_text(json.dumps(one))
    monkeypatch.setattr(sys, "argv", ["sampled_compare", str(folder)])
    return sampled_compare.main()


def test_arms_that_are_alike(tmp_path, monkeypatch, capsys):
    g = torch.Generator().manual_seed(1)
    seeds = {
        "count": 16, "distinct": 15, "equal": {"again": 16, "alone": 15},
        "differences": [("alone", 3, 21)],
    }  # fmt: skip
    greedy = {"count": 4, "equal": {"alone": 1}, "largest": {"alone": 0.0625}}
    drawn = arm("drawn", g, seeds=seeds, greedy=greedy, replies=[(10, 8, 18), (20, 22, 42)])
    assert compare(tmp_path, monkeypatch, arm("plain", g), drawn) == 0
    said = capsys.readouterr().out
    assert "24 tests" in said
    assert "no difference" in said
    assert "| 32,768 | 2.000 ± " in said
    assert "drawn-32768: of 16 seeded replies equal: again 16, alone 15" in said
    assert "15 differ from each other" in said
    assert "alone: reply 3 differs from token 21 on" in said
    assert "drawn-32768: of 4 greedy replies' log probabilities equal: alone 1" in said
    assert "largest differences: alone 0.062" in said


def test_an_arm_that_differs_at_one_token(tmp_path, monkeypatch, capsys):
    g = torch.Generator().manual_seed(2)
    arms = arm("plain", g), arm("fixed", g), arm("drawn", g, shift=0.1)
    assert compare(tmp_path, monkeypatch, *arms) == 1
    assert "DIFFERENT" in capsys.readouterr().out
    for test in comparisons(arms[0], arms[2]):
        if test.what != "all three":  # spread over many more outcomes
            assert (test.found.p_value < 1e-4) == (test.what == "token 2")


def test_nothing_to_compare(tmp_path, monkeypatch, capsys):
    g = torch.Generator().manual_seed(3)
    assert compare(tmp_path, monkeypatch, arm("drawn", g)) == 1
    assert "nothing to compare" in capsys.readouterr().err


def test_files_of_one_arm_are_counted_together():
    def file(name, seed, **counts):
        return {
            "arm": name, "map_size": 8192, "random_seed": seed,
            "counts": {"T 1.0": [counts, {"9": 1}]}, "replies": [(seed, 1, 2)],
        }  # fmt: skip

    no_counts = {"arm": "drawn", "map_size": 8192, "random_seed": 5, "counts": {}}
    files = [file("drawn", 5, a=2, b=1), file("plain", 5, a=1), file("drawn", 6, b=3), no_counts]
    drawn, plain = together(files)
    assert drawn["counts"] == {"T 1.0": [{"a": 2, "b": 4}, {"9": 2}]}
    assert drawn["replies"] == [(5, 1, 2), (6, 1, 2)]
    assert plain["counts"] == {"T 1.0": [{"a": 1}, {"9": 1}]}
    with pytest.raises(ValueError, match=r"drawn 8,192 have the random seed 6"):
        together([*files, file("drawn", 6, a=1)])


def test_the_gain_of_drawn_children_by_map_size():
    arms = [
        {"arm": name, "map_size": size, "replies": replies}
        for name, size, replies in (
            ("fixed", 8, [(10, 10, 20), (10, 6, 16)]),
            ("drawn", 8, [(10, 10, 20)]),
            ("drawn", 9, [(2, 1, 3)]),
        )
    ]
    lines = accept_table(arms)
    assert lines[0] == "| map | fixed | drawn | drawn - fixed |"
    # Deviations 10 - 8 and 6 - 8 over 20 cycles.
    assert lines[2] == "| 8 | 1.800 ± 0.141 | 2.000 ± 0.000 | +0.200 ± 0.141 |"
    assert lines[3] == "| 9 |  | 1.500 ± 0.000 | +nan ± nan |"


def test_marginals():
    counts = {"5,6,7": 2, "5,8,7": 3, "1,6,7": 4}
    assert marginal(counts, (0,)) == {"5": 5, "1": 4}
    assert marginal(counts, (1, 2)) == {"6,7": 6, "8,7": 3}


def test_the_error_of_an_accept_length_is_that_of_many_runs():
    """Replies of 5 to 30 cycles whose drafts are accepted together or not at all."""
    g = torch.Generator().manual_seed(4)
    lengths, errors = [], []
    for _ in range(300):
        cycles = torch.randint(5, 30, (100,), generator=g)
        accepted = cycles * torch.randint(0, 4, (100,), generator=g)
        rows = [(int(c), int(a), int(c + a)) for c, a in zip(cycles, accepted, strict=True)]
        length, error = accept_length(rows)
        lengths.append(length)
        errors.append(error)
    spread = float(torch.tensor(lengths).std())
    assert sum(lengths) / 300 == pytest.approx(2.5, abs=0.03)
    assert sum(errors) / 300 == pytest.approx(spread, rel=0.12)


def test_flags_of_each_arm():
    flags = {name: drafting_flags(name, 8192) for name in ARMS}
    drawn = "--speculative-use-rejection-sampling"
    assert flags["plain"] == []
    assert [name for name in ARMS if drawn in flags[name]] == ["drawn", "drawn-chain"]
    assert flags["drawn"] == [*flags["fixed"], drawn]
    at = flags["fixed-chain"].index("--speculative-eagle-topk")
    assert flags["fixed-chain"][at + 1] == "1"
