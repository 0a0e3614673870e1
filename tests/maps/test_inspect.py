"""Coverage against sums made by hand, and ``frspec inspect`` as text and pictures."""

import json
import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_frspec import cli
from sgl_frspec.maps import TokenMap, read_vocabulary, save_token_map
from sgl_frspec.maps.categories import id_categories, token_category
from sgl_frspec.maps.coverage import (
    coverage_at,
    coverage_curve,
    id_order_map,
    missing_ids,
    own_counts,
    own_coverage,
)
from sgl_frspec.maps.inspection import readable
from sgl_frspec.maps.token_map import MapMetadata, TokenMapError
from tests.maps.conftest import TEXT
from tests.maps.test_rank import rank


def int64(values):
    return np.asarray(values, dtype=np.int64)


@settings(max_examples=50, deadline=None)
@given(st.permutations(range(12)), st.lists(st.integers(0, 9), min_size=8, max_size=20).filter(any))
def test_coverage_is_the_share_of_occurrences_inside(ids, counts):
    token_map = TokenMap(int64(ids))
    expected = [
        sum(counts[i] for i in ids[:size] if i < len(counts)) / sum(counts)
        for size in range(1, len(ids) + 1)
    ]
    assert coverage_curve(token_map, int64(counts)).tolist() == pytest.approx(expected)
    shares = coverage_at(token_map, int64(counts), [1, 5, 12, 400])
    assert shares == pytest.approx([expected[0], expected[4], expected[11], expected[11]])


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 3), min_size=10, max_size=10).filter(any), st.integers(1, 9))
def test_what_is_missing_and_what_is_covered_make_the_whole(counts, size):
    token_map = TokenMap(int64([3, 1, 4, 5, 9, 2, 6]))
    missing = missing_ids(token_map, int64(counts), size).tolist()
    assert missing == sorted(missing, key=lambda i: (-counts[i], i))
    outside = sum(counts[i] for i in missing) / sum(counts)
    assert coverage_at(token_map, int64(counts), [size])[0] + outside == pytest.approx(1)


def test_a_cut_map_remembers_what_it_no_longer_covers():
    metadata = MapMetadata(total_count=10)
    token_map = TokenMap(int64([7, 3, 5]), int64([4, 3, 1]), metadata)
    assert own_coverage(token_map, [1, 2, 3, 9]) == pytest.approx([0.4, 0.7, 0.8, 0.8])
    assert own_coverage(TokenMap(int64([7, 3])), [1]) is None


def test_text_without_tokens_has_no_coverage():
    with pytest.raises(TokenMapError, match="no tokens"):
        coverage_at(TokenMap(int64([1])), int64([0, 0]), [1])


def test_id_order_has_required_ids_first(model_dir):
    vocabulary = read_vocabulary(model_dir)
    ids = id_order_map(vocabulary).ids.tolist()
    n = len(vocabulary.required_ids)
    assert tuple(ids[:n]) == vocabulary.required_ids
    assert ids[n:] == sorted(set(range(vocabulary.size)) - set(vocabulary.required_ids))


@pytest.mark.parametrize(
    ("text", "category"),
    [
        (" the", "Latin"),
        ("Überraschung", "Latin"),
        ("привет", "Cyrillic"),
        ("世界", "Chinese characters"),
        ("こんにちは", "Japanese kana"),
        ("한국", "Korean"),
        ("नमस्ते", "Devanagari"),
        ("سلام", "Arabic"),
        ("µ", "Greek"),
        ("123", "digits"),
        (" \n\n", "white space"),
        ("):", "punctuation and symbols"),
    ],
)
def test_category_of_text(text, category):
    assert token_category(text.encode()) == category


def test_category_of_half_a_character():
    assert token_category("世".encode()[:2]) == "pieces of characters"


def test_every_id_has_a_category(model_dir):
    vocabulary = read_vocabulary(model_dir)
    kinds = id_categories(vocabulary)
    assert set(kinds) == set(vocabulary.tokens.values())
    assert {kinds[i] for i in vocabulary.required_ids} == {"special tokens"}
    assert readable(vocabulary.required_ids[0], vocabulary) == "<|im_end|>"
    assert readable(vocabulary.tokens["Ġthe"], vocabulary) == "' the'"
    assert readable(10**6, vocabulary) == "id 1000000"


@pytest.fixture
def inspected(model_dir, tmp_path):
    """A map ranked from English, with held-out English and Chinese."""
    own = tmp_path / "own.txt"
    own.write_text(TEXT[0])
    token_map = rank(model_dir, str(own))
    path = tmp_path / "map.safetensors"
    save_token_map(token_map, path)
    english, chinese = tmp_path / "en.txt", tmp_path / "zh.jsonl"
    english.write_text("the dog sat")
    chinese.write_text(json.dumps({"text": TEXT[3]}))
    return path, token_map, [f"{english},name=English", f"{chinese},name=Chinese"]


def table(text, title):
    lines = text.split(f"## {title}\n")[1].split("\n## ")[0].splitlines()
    rows = [line[1:-1].split("|") for line in lines if line.startswith("|")]
    return [[cell.strip() for cell in row] for row in rows]


def test_report_on_held_out_text(inspected, model_dir, capsys):
    path, token_map, texts = inspected
    tokenizer = ["--tokenizer", str(model_dir)]
    size = len(token_map.metadata.required_ids) + 15
    argv = ["inspect", str(path), *tokenizer, "--sizes", f"{size},400", "--text", *texts]
    assert cli.main([*argv, "--workers", "1", "--missing", "2"]) == 0
    out = capsys.readouterr().out
    headings, _, *rows = table(out, "Share of the given text")
    assert headings == ["map", "domain", str(size), "400", "tokens"]
    shares = {(row[0], row[1]): row[2:] for row in rows}
    assert shares["map", "English"] == ["100.00%", "100.00%", "3"]
    assert shares["map", "Chinese"][:2] == ["0.00%", "100.00%"]
    tokens = int(shares["map", "Chinese"][2])
    assert shares["map", "all"][0] == f"{300 / (3 + tokens):.2f}%"
    assert shares["token-id order", "English"][0] == "0.00%"
    assert "3: <\\|im_end\\|> <\\|im_start\\|> <tool_call> |" in " ".join(out.split())


def test_missing_tokens_are_listed_by_domain(inspected, model_dir, capsys):
    path, token_map, texts = inspected
    size = len(token_map.metadata.required_ids) + 15
    argv = ["inspect", str(path), "--tokenizer", str(model_dir), "--sizes", str(size)]
    assert cli.main([*argv, "--workers", "1", "--missing", "2", "--text", *texts]) == 0
    rows = table(capsys.readouterr().out, f"Most frequent tokens outside the first {size:,} ids")
    assert [row[1] for row in rows[2:]] == ["Chinese", "Chinese", "all", "all"]


def test_several_maps_are_compared(inspected, model_dir, tmp_path, capsys):
    path, token_map, texts = inspected
    chinese = tmp_path / "chinese.safetensors"
    other = rank(model_dir, texts[1].partition(",")[0])
    save_token_map(other, chinese)
    argv = ["inspect", str(path), str(chinese), "--tokenizer", str(model_dir), "--workers", "1"]
    assert cli.main([*argv, "--sizes", "30", "--text", *texts]) == 0
    rows = table(capsys.readouterr().out, "Share of the given text")[2:]
    shares = {(row[0], row[1]): row[2] for row in rows}
    assert shares["chinese", "Chinese"] == "100.00%"
    counts = own_counts(other)
    assert counts is not None
    assert shares["map", "Chinese"] == f"{100 * coverage_at(token_map, counts, [30])[0]:.2f}%"
    assert float(shares["map", "Chinese"][:-1]) < 50


@pytest.mark.parametrize("suffix", [".html", ".svg", ".png"])
def test_pictures(inspected, model_dir, tmp_path, suffix):
    path, _, texts = inspected
    pictures = []
    for name in "ab":
        picture = tmp_path / f"{name}{suffix}"
        argv = ["inspect", str(path), "--tokenizer", str(model_dir), "--picture", str(picture)]
        assert cli.main([*argv, "--workers", "1", "--text", *texts]) == 0
        pictures.append(picture.read_bytes())
    assert pictures[0] == pictures[1]
    if suffix == ".png":
        assert pictures[0].startswith(b"\x89PNG")
        return
    text = pictures[0].decode()
    svg = ElementTree.fromstring(text[text.index("<svg") : text.index("</svg>") + 6])
    labels = {element.text for element in svg.iter("{http://www.w3.org/2000/svg}text")}
    assert {"English", "Chinese", "all", "token-id order"} <= labels
    for loads in ("<script", "<link", "<img", "src="):
        assert loads not in text


def test_a_map_name_cannot_put_markup_into_the_page(inspected, tmp_path):
    path, _, _ = inspected
    evil = path.rename(tmp_path / "<script>x.safetensors")
    page = tmp_path / "p.html"
    assert cli.main(["inspect", str(evil), "--picture", str(page)]) == 0
    assert "<script" not in page.read_text()


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--text", "x.txt"], "needs --tokenizer"),
        (["--picture", "p.gif"], "name the output something.html or .svg or .png"),
        (["--sizes", "4k,none"], "size 'none'"),
    ],
)
def test_wrong_arguments_are_named(inspected, argv, message, capsys):
    assert cli.main(["inspect", str(inspected[0]), *argv]) == 1
    assert message in capsys.readouterr().err


def test_two_domains_of_one_name(inspected, model_dir, capsys):
    path, _, texts = inspected
    argv = ["inspect", str(path), "--tokenizer", str(model_dir), "--workers", "1", "--text"]
    assert cli.main([*argv, texts[0], texts[0]]) == 1
    assert "two sources are called 'English'" in capsys.readouterr().err
