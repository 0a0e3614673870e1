"""Merge, cut, convert and diff: their laws, and what they refuse."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_frspec import cli
from sgl_frspec.maps import MapMetadata, TokenMap, load_token_map, save_token_map
from sgl_frspec.maps.corpus.checkpoint import Tally
from sgl_frspec.maps.corpus.sources import Source
from sgl_frspec.maps.merging import merge_maps
from sgl_frspec.maps.rank import RankOptions, rank_tally
from sgl_frspec.maps.token_map import TokenMapError
from sgl_frspec.maps.vocabulary import read_vocabulary

SIZE = 300
COUNTS = st.lists(st.integers(0, 5), min_size=SIZE, max_size=SIZE).filter(any)


@pytest.fixture(scope="module")
def vocabulary(model_dir):
    return read_vocabulary(model_dir)


def ranked(vocabulary, *counts, weights=None):
    padded = [np.zeros(vocabulary.size, dtype=np.int64) for _ in counts]
    for row, given_counts in zip(padded, counts, strict=True):
        row[: len(given_counts)] = given_counts
    tally = Tally(padded, [1] * len(counts))
    weights = weights or [None] * len(counts)
    sources = [Source(f"{i}.txt", w) for i, w in enumerate(weights)]
    return rank_tally(tally, sources, [None] * len(counts), vocabulary, RankOptions())


def assert_same_ranking(one, other):
    assert one.ids.tolist() == other.ids.tolist()
    assert one.counts.tolist() == other.counts.tolist()
    assert one.metadata.total_count == other.metadata.total_count
    assert one.metadata.required_ids == other.metadata.required_ids


@settings(max_examples=40, deadline=None)
@given(counts=COUNTS)
def test_one_map_merged_is_itself(vocabulary, counts):
    token_map = ranked(vocabulary, counts)
    assert merge_maps([token_map]) is token_map
    twice = merge_maps([token_map, token_map])
    assert twice.ids.tolist() == token_map.ids.tolist()
    assert twice.counts is not None
    assert token_map.counts is not None
    assert twice.counts.tolist() == (2 * token_map.counts).tolist()


@settings(max_examples=40, deadline=None)
@given(a=COUNTS, b=COUNTS)
def test_merged_rankings_are_the_ranking_of_all_sources(vocabulary, a, b):
    merged = merge_maps([ranked(vocabulary, a), ranked(vocabulary, b)])
    assert_same_ranking(merged, ranked(vocabulary, a, b))


@settings(max_examples=40, deadline=None)
@given(a=COUNTS, b=COUNTS, weights=st.tuples(st.floats(0.01, 100), st.floats(0.01, 100)))
def test_weighted_merging_is_weighted_ranking(vocabulary, a, b, weights):
    merged = merge_maps([ranked(vocabulary, a), ranked(vocabulary, b)], weights)
    together = ranked(vocabulary, a, b, weights=weights)
    assert merged.ids.tolist() == together.ids.tolist()
    assert merged.counts is not None
    assert together.counts is not None
    assert merged.counts.tolist() == together.counts.tolist()


@settings(max_examples=40, deadline=None)
@given(counts=COUNTS, size=st.integers(5, 200))
def test_cutting_what_was_cut_is_cutting_once(vocabulary, counts, size):
    token_map = ranked(vocabulary, counts)
    assert token_map.first(250).first(size).ids.tolist() == token_map.ids[:size].tolist()


def test_an_id_that_a_cut_removed_keeps_its_share_of_the_total(vocabulary):
    counts = [0] * 100
    counts[50], counts[60], counts[70] = 60, 30, 10
    cut = ranked(vocabulary, counts).first(len(vocabulary.required_ids) + 1)
    other = ranked(vocabulary, [0] * 60 + [1])
    merged = merge_maps([cut, other], [1, 1])
    assert merged.counts is not None
    shares = dict(zip(merged.ids.tolist(), merged.counts.tolist(), strict=True))
    assert shares[50] == pytest.approx(0.3e12)
    assert shares[60] == pytest.approx(0.5e12)


def test_sources_of_a_weighted_merge_carry_their_share(vocabulary):
    one = ranked(vocabulary, [1, 2], [3, 4], weights=[1, 3])
    other = ranked(vocabulary, [5])
    merged = merge_maps([one, other], [60, 40])
    assert [s.weight for s in merged.metadata.sources] == [0.15, 0.45, 0.4]


def edited(token_map, **changes):
    fields = {**token_map.metadata.__dict__, **changes}
    return TokenMap(token_map.ids, token_map.counts, MapMetadata(**fields))


@pytest.mark.parametrize(
    ("change", "weights", "message"),
    [
        ({"tokenizer_fingerprint": "f" * 64}, None, "tokenizer"),
        ({"vocab_size": 9999}, None, "vocabulary size"),
        ({"count_unit": "share"}, None, "give every map a weight"),
        ({}, [1, None], "every source a positive weight"),
        ({}, [1, -1], "positive weight"),
    ],
)
def test_maps_that_cannot_be_merged(vocabulary, change, weights, message):
    token_map = ranked(vocabulary, [1, 2, 3])
    with pytest.raises(TokenMapError, match=message):
        merge_maps([token_map, edited(token_map, **change)], weights)


def test_a_map_without_counts_cannot_be_weighed(vocabulary):
    token_map = ranked(vocabulary, [1, 2, 3])
    bare = TokenMap(token_map.ids, None, token_map.metadata)
    with pytest.raises(TokenMapError, match="map 2 has no counts"):
        merge_maps([token_map, bare])


def test_merge_command(vocabulary, tmp_path, capsys):
    a, b, out = (tmp_path / f"{name}.safetensors" for name in "abo")
    save_token_map(ranked(vocabulary, [3, 2, 1]), a)
    save_token_map(ranked(vocabulary, [1, 5]).first(20), b)
    assert cli.main(["merge", f"{a},weight=3", f"{b},weight=1", "-o", str(out)]) == 0
    assert "0 filled in" not in capsys.readouterr().out
    merged = load_token_map(out)
    counts = dict(zip(merged.ids.tolist(), merged.counts.tolist(), strict=True))  # type: ignore
    assert counts[0] == pytest.approx(1e12 * (0.75 * 3 / 6 + 0.25 * 1 / 6))
    assert cli.main(["merge", str(a), "-o", str(out)]) == 0
    assert out.read_bytes() == a.read_bytes()


def test_cut_command(vocabulary, tmp_path, capsys):
    whole, part = tmp_path / "whole.safetensors", tmp_path / "part.safetensors"
    save_token_map(ranked(vocabulary, [0] * 100 + [75, 25]), whole)
    size = len(vocabulary.required_ids) + 1
    assert cli.main(["cut", str(whole), "--size", str(size), "-o", str(part)]) == 0
    assert "75.00% of the ranking's corpus" in capsys.readouterr().out
    assert load_token_map(part).ids.tolist() == load_token_map(whole).ids[:size].tolist()
    assert cli.main(["cut", str(whole), "--size", "1", "-o", str(part)]) == 1
    assert "would drop required id" in capsys.readouterr().err
    assert cli.main(["cut", str(whole), "--size", "many", "-o", str(part)]) == 1


@settings(max_examples=25, deadline=None)
@given(ids=st.lists(st.integers(0, 10**6), min_size=1, max_size=60, unique=True))
def test_convert_round_trips(tmp_path_factory, ids):
    folder = tmp_path_factory.mktemp("convert")
    first, middle, last = folder / "a.pt", folder / "b.safetensors", folder / "c.pt"
    torch.save(ids, first)
    assert cli.main(["convert", str(first), str(middle)]) == 0
    assert load_token_map(middle).ids.tolist() == ids
    assert cli.main(["convert", str(middle), str(last)]) == 0
    # The two lines with which stock SGLang reads a map.
    stock = torch.tensor(torch.load(last, weights_only=True), dtype=torch.int64)
    assert stock.tolist() == ids


def test_convert_puts_the_missing_end_of_turn_first(model_dir, vocabulary, tmp_path, capsys):
    published, ours, stock = tmp_path / "f.pt", tmp_path / "m.safetensors", tmp_path / "s.pt"
    required = vocabulary.required_ids
    ids = [i for i in range(50, 250) if i not in required]
    torch.save([*ids[:7], required[1], *ids[7:]], published)
    argv = ["convert", str(published), str(ours), "--tokenizer", str(model_dir)]
    assert cli.main(argv) == 0
    assert f"2 required ids were missing: {[required[0], required[2]]}" in capsys.readouterr().out
    token_map = load_token_map(ours)
    assert token_map.ids.tolist() == [*required, *ids]
    assert token_map.metadata.tokenizer_fingerprint == vocabulary.fingerprint
    assert cli.main(["convert", str(ours), str(stock), "--size", "64"]) == 0
    assert torch.load(stock, weights_only=True) == [*required, *ids][:64]


def test_convert_keeps_counts_and_refuses_another_tokenizer(vocabulary, model_dir, tmp_path):
    source, target = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    token_map = ranked(vocabulary, [4, 3, 2, 1])
    save_token_map(token_map, source)
    argv = ["convert", str(source), str(target), "--tokenizer", str(model_dir)]
    assert cli.main(argv) == 0
    assert_same_ranking(load_token_map(target), token_map)
    target.unlink()
    save_token_map(edited(token_map, tokenizer_fingerprint="0" * 64), source)
    assert cli.main(argv) == 1
    assert not target.exists()


def test_convert_refuses_ids_beyond_the_vocabulary(model_dir, tmp_path, capsys):
    source = tmp_path / "a.pt"
    torch.save([1, 2, 128_000], source)
    target = tmp_path / "b.safetensors"
    assert cli.main(["convert", str(source), str(target), "--tokenizer", str(model_dir)]) == 1
    assert "128000" in capsys.readouterr().err


def test_diff_names_what_only_one_map_has(vocabulary, model_dir, tmp_path, capsys):
    a, b = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    n = len(vocabulary.required_ids)
    save_token_map(ranked(vocabulary, [0] * 60 + [3, 2]), a)
    save_token_map(ranked(vocabulary, [0] * 60 + [6, 0, 2]), b)
    argv = ["diff", str(a), str(b), "--sizes", f"{n + 1},{n + 2}", "--tokenizer", str(model_dir)]
    assert cli.main(argv) == 0
    rows = [line.split("|")[1:-1] for line in capsys.readouterr().out.splitlines() if "|" in line]
    rows = [[cell.strip() for cell in row] for row in rows]
    assert [str(n + 1), str(n + 1), "100.00%", "60.00%", "75.00%"] in rows
    share = f"{100 * (n + 1) / (n + 2):.2f}%"
    assert [str(n + 2), str(n + 1), share, "60.00%", "75.00%"] in rows
    only_a, only_b = repr(chr(0x5E)), repr(chr(0x5F))
    assert vocabulary.by_id[61] == only_a[1:-1]
    assert any(row[:3] == [only_a, "61", str(n + 1)] for row in rows)
    assert any(row[:3] == [only_b, "62", str(n + 1)] for row in rows)


def test_diff_refuses_maps_of_different_tokenizers(vocabulary, tmp_path, capsys):
    a, b = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    token_map = ranked(vocabulary, [1])
    save_token_map(token_map, a)
    save_token_map(edited(token_map, tokenizer_fingerprint="0" * 64), b)
    assert cli.main(["diff", str(a), str(b)]) == 1
    assert "another token in each" in capsys.readouterr().err
