"""The order of starts and workloads, what is left out, and what failures leave behind."""

import time
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench.serving import comparison
from bench.serving.comparison import Comparison, Plan
from bench.serving.measure import Lengths
from bench.serving.prompts import ChainPrompts, Workload
from bench.serving.servers import Fleet, Server, Settings
from bench.serving.trace import RoundProfile
from bench.serving.trace_file import TraceError
from bench.serving.variants import Tree, parse_variants
from tests.bench.fake_server import fake_server
from tests.bench.test_serve_measure import CHAIN, chain_reply

SMALL, LARGE = Workload(2, 20), Workload(4, 5000)


class Starts:
    """Stands in for ``running``: servers that answer by the chain, but for those told to fail."""

    def __init__(self, broken=(), dying=(), kv_tokens=None):
        self.names: list[list[str]] = []
        self.kv_tokens = kv_tokens or {}
        self.broken, self.dying = broken, dying

    @contextmanager
    def __call__(self, variants, settings, say):
        self.names.append([variant.name for variant in variants])
        fleet = Fleet()
        with ExitStack() as stack:
            for variant in variants:
                if variant.name in self.broken:
                    fleet.failures[variant.name] = "no memory"
                    continue
                reply = self._dies if variant.name in self.dying else chain_reply
                url = stack.enter_context(fake_server(reply))
                process: Any = SimpleNamespace(
                    url=url, log_tail=lambda: "last words", processes=lambda: []
                )
                kv_tokens = self.kv_tokens.get(variant.name, 9000)
                fleet.servers.append(Server(variant, process, 40.0 + len(self.names), kv_tokens))
            yield fleet

    @staticmethod
    def _dies(path, body):
        raise RuntimeError("illegal address")


def compare(monkeypatch, starts, variants=("eagle", "frspec"), **changes):
    monkeypatch.setattr(comparison, "running", starts)
    monkeypatch.setattr(Fleet, "idle_cores", lambda fleet: 0.25)
    paths = Path("t"), Path("d"), Path("m")
    settings = Settings(
        *paths, Tree(3, 4, 16), Path("logs"), gpu=False, backend="b", batches=(2,),
        start_together=False, kv_tokens=0, start_seconds=1.0,
    )  # fmt: skip
    values: dict[str, Any] = {
        "workloads": [SMALL],
        "side_by_side": True,
        "deadline": float("inf"),
        "profiled": [],
    }
    plan = Plan(
        run="r", shape="s", settings=settings, variants=parse_variants(variants),
        prompts=ChainPrompts(CHAIN), lengths=Lengths(5, 17), alternations=2,
        traces=Path("traces"), **values | changes,
    )  # fmt: skip
    said: list[str] = []
    run = Comparison(plan, said.append)
    return run, list(run.cases()), said


def test_side_by_side_starts_all_once(monkeypatch):
    starts = Starts()
    run, [rows], said = compare(monkeypatch, starts)
    assert starts.names == [["eagle", "frspec"]]
    assert [(row.variant, row.alternations, row.wrong) for row in rows] == [
        ("eagle", 2, 0),
        ("frspec", 2, 0),
    ]
    assert rows[0].start_s == 41.0
    assert rows[0].kv_tokens == 9000
    assert any("0.25 processor cores in all, GPU busy 0% of the time: idle" in s for s in said)
    assert run.failures == {}
    assert run.undone == []


def test_in_turn_starts_each_alone_every_time(monkeypatch):
    starts = Starts()
    _, [rows], _ = compare(monkeypatch, starts, side_by_side=False)
    assert starts.names == [["eagle"], ["frspec"]] * 2
    assert [(row.variant, row.alternations, len(row.ms_samples)) for row in rows] == [
        ("eagle", 2, 2),
        ("frspec", 2, 2),
    ]
    assert [row.start_s for row in rows] == [42.0, 43.0]  # medians of 41, 43 and of 42, 44


def test_a_workload_that_does_not_fit_is_named_and_the_others_run(monkeypatch):
    run, cases, said = compare(monkeypatch, Starts(), workloads=[LARGE, SMALL])
    assert [(row.batch, row.context) for [row, _] in cases] == [(2, 20)]
    assert run.undone == [LARGE]
    assert any("batch 4, context 5,000, eagle left out: needs 20," in line for line in said)


@pytest.mark.parametrize("side_by_side", [True, False])
def test_a_server_that_cannot_hold_a_workload_leaves_it_to_the_others(monkeypatch, side_by_side):
    run, cases, said = compare(
        monkeypatch,
        Starts(kv_tokens={"frspec": 30_000}),
        workloads=[LARGE, SMALL],
        side_by_side=side_by_side,
    )
    assert [[row.variant for row in rows] for rows in cases] == [["frspec"], ["eagle", "frspec"]]
    assert [row.alternations for rows in cases for row in rows] == [2, 2, 2]
    assert run.undone == []
    assert "batch 4, context 5,000, eagle left out: needs 20,548 tokens of KV cache, 9,000" in next(
        line for line in said if "left out" in line
    )


@pytest.mark.parametrize("side_by_side", [True, False])
def test_rows_come_when_they_are_timed_and_again_when_they_are_traced(monkeypatch, side_by_side):
    traced = RoundProfile(40, 0.5, 0.1, 2.0, 90.0, 1.0, 7.0, 3.0, 1.0, {"gemm": (2.0, 30.0)})

    def profile(server, texts, folder, rounds):
        if server.variant.name == "eagle":
            raise TraceError("no trace came")
        return traced

    monkeypatch.setattr(comparison.trace, "profile", profile)
    _, cases, said = compare(
        monkeypatch,
        Starts(kv_tokens={"eagle": 30_000, "frspec": 30_000}),
        profiled=[SMALL],
        side_by_side=side_by_side,
    )
    assert [[row.launches for row in rows] for rows in cases][-1] == [None, 7.0]
    assert cases[-1][1].idle_share == 1 - 0.5 / cases[-1][1].ms_round
    if side_by_side:
        assert [[row.launches for row in rows] for rows in cases] == [[None, None], [None, 7.0]]
    assert sum("eagle: no profile: no trace came" in line for line in said) == 2 - side_by_side


@pytest.mark.parametrize("side_by_side", [True, False])
def test_after_the_deadline_nothing_begins(monkeypatch, side_by_side):
    before = time.monotonic() - 1
    run, cases, _ = compare(
        monkeypatch, Starts(), deadline=before, side_by_side=side_by_side, workloads=[SMALL]
    )
    assert cases == []
    assert run.undone == [SMALL]


@pytest.mark.parametrize("side_by_side", [True, False])
def test_servers_that_fail_are_reported_and_the_others_go_on(monkeypatch, side_by_side):
    starts = Starts(broken=["eagle"], dying=["x"])
    run, [rows], _ = compare(
        monkeypatch, starts, ("eagle", "x=eagle-map", "frspec"), side_by_side=side_by_side
    )
    assert [row.variant for row in rows] == ["frspec"]
    assert run.failures == {"eagle": "no memory", "x": "last words"}
    if not side_by_side:
        # What has failed once is not started again.
        assert starts.names == [["eagle"], ["x"], ["frspec"], ["frspec"]]


def test_no_server_at_all_makes_no_rows(monkeypatch):
    run, cases, _ = compare(monkeypatch, Starts(broken=["eagle", "frspec"]))
    assert cases == []
    assert set(run.failures) == {"eagle", "frspec"}
