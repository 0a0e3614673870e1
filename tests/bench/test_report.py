import json
from dataclasses import replace

import pytest

from bench import plots, report
from bench.op import Case
from bench.runner import Row
from bench.timing import copies_for
from tests.bench.toy import provider, toy_op


def _row(rows: int, name: str, us: float) -> Row:
    return Row("double", f"rows{rows}-H64-fp32", name, "ok", us, us, us, floor_us=0.5)


def test_table_shows_no_number_for_a_red_row(capsys):
    table = report.Table([("double", "rows1-H64-fp32", "ours")], timed=True)
    table.add(Row("double", "rows1-H64-fp32", "ours", "FAIL", note="wrong"))
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.split() == ["double", "rows1-H64-fp32", "ours", "FAIL:", "wrong"]


def test_markdown_has_a_column_for_each_timed_provider_and_compares_the_first():
    rows = [
        replace(_row(1, "ours", 2.0), pct_peak=25.0, speedup=2.0),
        _row(1, "torch", 4.0),
        _row(1, "peer", 3.0),
        replace(_row(1, "other problem", 0.1), floor_us=0.01, context=True),
        Row("double", "rows8-H64-fp32", "ours", "FAIL", note="wrong"),
        _row(8, "torch", 5.0),
        Row("double", "rows8-H64-fp32", "peer", "absent"),
    ]
    lines = report.markdown(rows, {"gpu": "H200", "torch": "2.11"}).splitlines()
    assert lines[0] == "gpu H200 · torch 2.11"
    assert lines[2] == (
        "| op | case | ours | torch | peer | other problem"
        " | floor | % of peak | × baseline | × best other |"
    )
    assert lines[4] == (
        "| double | rows1-H64-fp32 | 2.00 | 4.00 | 3.00 | 0.10 | 0.50 | 25 | 2.00 | 1.50 |"
    )
    assert lines[5] == "| double | rows8-H64-fp32 | **FAIL** | 5.00 | – | – | – | – | – | – |"


def test_json_is_strict(tmp_path):
    red = Row("double", "rows1-H64-fp32", "ours", "FAIL", max_error=float("nan"), note="NaN")
    report.write([red, _row(1, "torch", 4.0)], {"gpu": "H200"}, tmp_path, "kernels")

    def refuse(constant):
        raise ValueError(constant)

    text = (tmp_path / "kernels.json").read_text()
    rows = json.loads(text, parse_constant=refuse)["rows"]
    assert [row["max_error"] for row in rows] == [None, None]
    assert [row["us_p50"] for row in rows] == [None, 4.0]


def test_plot_has_a_line_for_each_provider_and_the_floor(tmp_path):
    op = toy_op(ours=provider(lambda x: x))
    rows = [_row(r, name, r + 1.0) for r in (1, 8, 64) for name in ("torch", "ours")]
    (image,) = plots.draw(op, op.cases, rows, tmp_path)
    assert image.name == "double-rows.png"
    assert image.read_bytes().startswith(b"\x89PNG")


def test_no_plot_of_a_single_point(tmp_path):
    op = toy_op()
    assert plots.draw(op, op.cases, [_row(1, "torch", 1.0)], tmp_path) == []


def test_labels_that_would_overlap_are_left_out():
    labels = plots._labels([8192, 16_384, 32_768, 128_256, 151_936])
    assert labels == ["8,192", "16,384", "32,768", "128,256", ""]
    assert plots._labels([1, 16]) == ["1", "16"]


@pytest.mark.parametrize(
    ("touched", "copies"),
    [(16 << 10, 64), (60 << 20, 6), (300 << 20, 2), (40 << 30, 1)],
)
def test_enough_inputs_to_leave_the_cache_and_not_the_memory(touched, copies):
    assert copies_for(touched, 60 << 20) == copies if touched < 24 << 30 else copies == 1


def test_case_ids_read_as_words():
    assert Case(rows=16, V=32768, dtype="bf16", head="fp8").id == "rows16-V32768-bf16-fp8"
