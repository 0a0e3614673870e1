import pytest

from bench import plots, report
from bench.op import Case
from bench.runner import Row
from bench.timing import copies_for
from tests.bench.toy import provider, toy_op


def _row(rows: int, name: str, us: float) -> Row:
    return Row("double", f"rows{rows}-H64-fp32", name, "ok", us, us, us, floor_us=0.5)


def test_table_shows_no_number_for_a_red_row(capsys):
    table = report.Table([("double", "rows1-H64-fp32", "ours")])
    table.add(Row("double", "rows1-H64-fp32", "ours", "FAIL", note="wrong"))
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.split() == ["double", "rows1-H64-fp32", "ours", "FAIL:", "wrong"]


def test_markdown_has_a_column_for_each_timed_provider():
    text = report.markdown([_row(1, "torch", 4.0), _row(1, "ours", 2.0), _row(8, "torch", 5.0)])
    assert text.splitlines()[0] == "| op | case | torch | ours | floor |"
    assert "| double | rows1-H64-fp32 | 4.00 | 2.00 | 0.50 |" in text
    assert "| double | rows8-H64-fp32 | 5.00 | – | 0.50 |" in text


def test_plot_has_a_line_for_each_provider_and_the_floor(tmp_path):
    op = toy_op(ours=provider(lambda x: x))
    rows = [_row(r, name, r + 1.0) for r in (1, 8, 64) for name in ("torch", "ours")]
    (image,) = plots.draw(op, op.cases, rows, tmp_path)
    assert image.name == "double-rows.png"
    assert image.read_bytes().startswith(b"\x89PNG")


def test_no_plot_of_a_single_point(tmp_path):
    op = toy_op()
    assert plots.draw(op, op.cases, [_row(1, "torch", 1.0)], tmp_path) == []


@pytest.mark.parametrize(
    ("touched", "copies"),
    [(16 << 10, 64), (60 << 20, 6), (300 << 20, 2), (40 << 30, 1)],
)
def test_enough_inputs_to_leave_the_cache_and_not_the_memory(touched, copies):
    assert copies_for(touched, 60 << 20) == copies if touched < 24 << 30 else copies == 1


def test_case_ids_read_as_words():
    assert Case(rows=16, V=32768, dtype="bf16", head="fp8").id == "rows16-V32768-bf16-fp8"
