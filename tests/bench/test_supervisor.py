import sys
from dataclasses import replace

import pytest

from bench.supervisor import Supervisor, WorkerFailedError
from tests.bench.toy_worker import TOYS


def _supervisor(name: str, **options) -> Supervisor:
    op = TOYS[name]
    command = [sys.executable, "-m", "tests.bench.toy_worker", name]
    return Supervisor([(op, case) for case in op.small_cases], command=command, **options)


def _statuses(supervisor: Supervisor) -> list[list[tuple[str, str]]]:
    return [[(row.provider, row.status) for row in rows] for rows in supervisor.results()]


def test_one_worker_does_all_cases_whatever_libraries_print():
    supervisor = _supervisor("right")
    assert _statuses(supervisor) == [[("torch", "ok"), ("ours", "ok")]] * 3
    assert "triton" in supervisor.machine
    assert supervisor.undone == 0


def test_a_crash_costs_one_row_and_the_others_go_on():
    results = list(_supervisor("aborts").results())
    good = [("torch", "ok"), ("ours", "ok"), ("other", "ok")]
    statuses = [[(row.provider, row.status) for row in rows] for rows in results]
    assert statuses == [good, [("torch", "ok"), ("ours", "ERROR"), ("other", "ok")], good]
    assert results[1][1].note == "check: the process died of signal 6"


def test_a_lost_context_costs_one_row_a_case():
    results = list(_supervisor("loses").results())
    assert [[row.status for row in rows] for rows in results] == [["ok", "ERROR"]] * 2
    assert results[0][1].note == "check: broke the CUDA context: illegal address"


def test_a_capture_that_cannot_be_ended_costs_one_row_a_case():
    results = list(_supervisor("breaks_capture").results())
    assert [[row.status for row in rows] for rows in results] == [["ok", "ERROR"]] * 2
    assert results[0][1].note == "check: not capturable in a CUDA graph: illegal address"


@pytest.mark.gpu
def test_a_provider_that_cannot_be_captured_is_red_and_the_others_are_timed():
    first, second = _supervisor("synchronises").results()
    good = [("torch", "ok"), ("ours", "ok"), ("other", "ok")]
    assert [(row.provider, row.status) for row in first] == [good[0], ("ours", "ERROR"), good[2]]
    assert [(row.provider, row.status) for row in second] == good
    assert first[1].note.startswith("capture: not capturable in a CUDA graph: ")
    assert first[1].us_p50 is None
    assert all(row.us_p50 for row in (first[0], first[2], *second))


def test_a_hang_is_stopped():
    (rows,) = _supervisor("hangs", silence_s=3.0).results()
    assert [row.status for row in rows] == ["ok", "ERROR"]
    assert "no progress for 3 s" in rows[1].note


def test_out_of_time_leaves_cases_undone():
    supervisor = _supervisor("right", seconds=0.0)
    assert _statuses(supervisor) == []
    assert supervisor.undone == 3


def test_only_the_wanted_providers_run():
    supervisor = _supervisor("aborts", providers=["torch"])
    assert _statuses(supervisor) == [[("torch", "ok")]] * 3


def test_a_worker_that_does_not_start_is_an_error():
    op = TOYS["right"]
    command = [sys.executable, "-m", "tests.bench.toy_worker", "broken"]
    with pytest.raises(WorkerFailedError, match="exit status 1, its message is on standard error"):
        list(Supervisor([(op, op.small_cases[0])], command=command).results())


def test_an_operation_that_the_worker_does_not_have_is_named():
    op = replace(TOYS["right"], name="elsewhere")
    command = [sys.executable, "-m", "tests.bench.toy_worker", "right"]
    supervisor = Supervisor([(op, op.small_cases[0])], command=command)
    with pytest.raises(WorkerFailedError, match="LookupError: no operation elsewhere in the work"):
        list(supervisor.results())
