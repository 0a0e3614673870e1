"""Variants and trees from the command line, rows, their gains, files, table and plot."""

import dataclasses
import json
from pathlib import Path

import pytest

from bench.serving import plot, table
from bench.serving.measure import Sample
from bench.serving.rows import Row, gains, read, summary, write
from bench.serving.trace import RoundProfile
from bench.serving.variants import Tree, Variant, parse_variants


def row(variant="frspec", base="frspec", ms=4.0, **changes):
    plain = Row(
        run="r1", shape="8b", tree="3x4x16", variant=variant, base=base, backend="triton", flags="",
        batch=1, context=300, alternations=3, ms_round=ms, ms_min=ms - 0.5, ms_max=ms + 1,
        tokens_per_second=700.0, accept_length=2.9, expected_accept=2.95, wrong=0, requests=6,
        start_s=45.0, kv_tokens=60_000, kv_capped=True, ms_samples=[ms, ms - 0.5, ms + 1],
    )  # fmt: skip
    return dataclasses.replace(plain, **changes)


STOCK = [row("eagle", "eagle", 8.0), row("eagle-map", "eagle-map", 6.0)]


@pytest.mark.parametrize(
    ("text", "variant"),
    [
        ("nospec", Variant("nospec", "nospec")),
        ("eagle-map@fa3", Variant("eagle-map@fa3", "eagle-map", "fa3")),
        (
            "old-head=frspec@triton --frspec-stock head --x 'a b'",
            Variant("old-head", "frspec", "triton", ("--frspec-stock", "head", "--x", "a b")),
        ),
        ("f=frspec", Variant("f", "frspec")),
    ],
)
def test_variants(text, variant):
    assert Variant.parse(text) == variant


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("eagle3", "'eagle3' is none of nospec, eagle, eagle-map, frspec"),
        ("a=", "names no variant"),
        ("a/b=frspec", "cannot name a variant's log file"),
        ("=frspec", "cannot name a variant's log file"),
    ],
)
def test_wrong_variants_are_refused(text, message):
    with pytest.raises(ValueError, match=message):
        Variant.parse(text)


def test_two_variants_of_one_name_are_refused():
    with pytest.raises(ValueError, match="same name: frspec"):
        parse_variants(["frspec", "nospec", "frspec"])


def test_flags_of_a_variant():
    tree = Tree.parse("6x10x60")
    paths = Path("d"), Path("m.pt")
    assert Variant.parse("nospec").speculative_flags(*paths, tree) == []
    full = Variant.parse("eagle").speculative_flags(*paths, tree)
    assert full == [
        *("--speculative-algorithm", "EAGLE", "--speculative-draft-model-path", "d"),
        *("--speculative-num-steps", "6", "--speculative-eagle-topk", "10"),
        *("--speculative-num-draft-tokens", "60"),
    ]
    mapped = Variant.parse("eagle-map").speculative_flags(*paths, tree)
    ours = Variant.parse("frspec").speculative_flags(*paths, tree)
    # The same map, the same settings: the algorithm's name is all that differs.
    assert [word for word in mapped if word != "EAGLE"] == [w for w in ours if w != "FRSPEC"]
    assert "--speculative-token-map" in mapped


@pytest.mark.parametrize("text", ["3x4", "3x4x0", "axbxc", "3x4x16x2", "-3x4x16"])
def test_wrong_trees_are_refused(text):
    with pytest.raises(ValueError, match="write steps x top-k x draft tokens"):
        Tree.parse(text)


def test_summary_takes_medians_and_extremes():
    samples = [Sample(ms, 10, 30, 3.0, wrong, 40) for ms, wrong in ((50, 0), (40, 1), (90, 0))]
    found = summary(samples)
    assert (found["ms_round"], found["ms_min"], found["ms_max"]) == (5.0, 4.0, 9.0)
    assert found["tokens_per_second"] == 600.0
    assert found["wrong"] == 1
    assert found["ms_samples"] == [5.0, 4.0, 9.0]
    assert summary([Sample(50, 10, 30, 3.0, None, 40)])["wrong"] is None


def test_gains_are_over_the_stock_servers_of_the_same_case():
    ours = row(ms=4.0)
    elsewhere = [row("eagle-map", "eagle-map", 1.0, run="r2"), row("eagle", "eagle", 1.0, batch=4)]
    flash = row("eagle-map@fa3", "eagle-map", 5.0, backend="fa3")
    found = gains(ours, [*STOCK, ours, flash, *elsewhere])
    assert (found.full, found.mapped, found.best) == (2.0, 1.5, 1.25)
    # The stock server on the row's own backend, where there is one.
    assert gains(row(ms=4.0, backend="fa3"), [*STOCK, flash]).mapped == 1.25
    assert gains(row(ms=4.0, backend="frspec"), [flash, *STOCK]).mapped == 1.25
    assert gains(ours, [ours]).full is None


def test_idle_share_is_judged_by_the_untraced_round():
    ours = row(ms=4.0)
    ours.add_profile(RoundProfile(39, 3.0, 0.2, 9.0, 200, 1, 10, 5, 1, {"gemm": (2.0, 70.0)}))
    assert ours.idle_share == 0.25
    assert ours.gap_share == 0.05
    assert (ours.kernels, ours.graphs, ours.launches, ours.copies) == (200, 1, 10, 5)


def test_written_rows_are_read_again_and_merged(tmp_path):
    first, second = [*STOCK, row()], [row(run="r2", context=8192)]
    first[2].add_profile(RoundProfile(39, 3.0, 0.2, 9.0, 200, 1, 10, 5, 1, {"gemm": (2.0, 70.0)}))
    write(first, {"gpu": "H200", "git_sha": "a"}, tmp_path / "1")
    write(second, {"gpu": "H200", "git_sha": "b"}, tmp_path / "2")
    rows, machine = read([tmp_path / "1", tmp_path / "2"])
    assert machine == {"gpu": "H200", "git_sha": "a / b"}
    assert [json.loads(json.dumps(vars(r))) for r in rows] == [
        json.loads(json.dumps(vars(r))) for r in (*first, *second)
    ]
    assert len((tmp_path / "1/serve.csv").read_text().splitlines()) == 4


def test_a_folder_without_results_is_named(tmp_path):
    with pytest.raises(ValueError, match=f"no results of `bench serve` in {tmp_path}"):
        read([tmp_path])
    (tmp_path / "serve.json").write_text('{"machine": {}, "rows": [{"colour": 1}]}')
    with pytest.raises(ValueError, match="no results"):
        read([tmp_path])


def test_the_table_has_a_line_for_each_row_of_a_case():
    rows = [*STOCK, row(wrong=2), row(run="r2", wrong=None)]
    cases = table.cases(rows)
    assert [len(case) for case in cases] == [3, 1]
    lines = table.text(cases[0]).splitlines()
    assert lines[0] == "8b, tree 3x4x16, batch 1, context 300 (3 alternations)"
    assert lines[4].split() == [
        *("frspec", "4.000", "3.500–5.000", "2.00", "1.50", "1.50", "700", "2.90", "2.95"),
        *("–",) * 7,
        "4/6",
    ]
    assert table.text(cases[1]).split()[-1] == "?"
    assert "KV 60,000 tokens (given" in table.servers(rows)
    assert table.markdown(rows).count("\n| 8b, tree 3x4x16, batch 1, context 300 |") == 4


def test_the_plot_is_drawn(tmp_path):
    path = plot.draw([*STOCK, row(), row(context=8192), row(tree="6x10x60")], tmp_path)
    assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
