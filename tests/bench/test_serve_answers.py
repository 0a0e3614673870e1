"""The checks of answers: each kind of fault is found, and what is right passes."""

import itertools
import json
import random
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from bench.serving import soak
from bench.serving.prompts import held_out_texts
from bench.serving.scoring import Score, rounding_bound, scored
from bench.serving.soak import Memory, Soak, SoakReport
from bench.serving.soak_requests import KINDS, TOP_K, Outcome, Request, draw_request, fault
from bench.serving.text_report import Difference, Verdict, describe
from bench.serving.variants import Variant
from bench.serving.verify_text import TextCheck, differences
from tests.bench.fake_server import fake_server


def score(token, logprob, *others):
    return Score(token, logprob, sorted([(token, logprob), *others], key=lambda t: -t[1]))


# --- texts


def test_a_difference_carries_the_gap_at_its_position():
    plain = [
        [score(7, -0.1, (8, -3.0)), score(9, -0.7, (4, -0.71)), score(1, -0.1, (2, -4.0))],
        [score(7, -0.1, (8, -3.0)), score(9, -0.2, (4, -2.2)), score(1, -0.1, (2, -4.0))],
        [score(7, -0.1, (8, -3.0)), score(9, -0.2, (4, -2.2)), score(1, -0.1, (2, -4.0))],
    ]
    found = differences(plain, [[7, 4, 5], [7, 9, 1], [7, 6, 1]])
    assert [(d.prompt, d.position, d.plain, d.drafted) for d in found] == [
        (0, 1, 9, 4),
        (2, 1, 9, 6),
    ]
    assert found[0].gap == pytest.approx(0.01)
    assert found[0].behind == pytest.approx(0.01)
    assert found[1].behind is None


def test_a_text_that_ends_early_is_a_difference_beyond_rounding():
    [found] = differences([[score(7, -0.1, (8, -3.0)), score(9, -0.2, (4, -2.2))]], [[7]])
    verdict = Verdict("frspec", 1, 1, 0, 2.0, [found])
    assert verdict.unexplained(bound=100.0) == [found]


def test_a_verdict_tells_ties_from_wrong_tokens():
    tie, wrong = Difference(3, 5, 1, 2, 0.01, 0.01), Difference(4, 6, 1, 2, 0.9, 0.9)
    verdict = Verdict("frspec", 200, 51_200, 198, 2.5, [tie, wrong])
    assert verdict.unexplained(0.1) == [wrong]
    text = describe(verdict, 0.1)
    assert "198 of 200 texts of 256 tokens" in text
    assert "tie prompt 3 position 5: 1 → 2, top-two gap 0.0100" in text
    assert "WRONG prompt 4" in text


def test_the_bound_is_twice_the_largest_movement():
    decoded = [[score(1, -0.5, (2, -1.0)), score(3, -2.0, (4, -2.5))]]
    prefilled = [[score(1, -0.52, (2, -1.0)), score(3, -1.95, (4, -2.5))]]
    assert rounding_bound(decoded, prefilled) == pytest.approx(0.1)


def test_scores_are_those_of_the_continuation():
    def reply(path, body):
        assert body["logprob_start_len"] == [2, 0]
        answers = []
        for ids, start in zip(body["input_ids"], body["logprob_start_len"], strict=True):
            entries = [[None if i == start else -0.5 * i, t, None] for i, t in enumerate(ids)]
            tops = [[[-0.25 * i, 99, None], [-0.5 * i, t, None]] for i, t in enumerate(ids)]
            meta = {"input_token_logprobs": entries[start:], "input_top_logprobs": tops[start:]}
            answers.append({"output_ids": [1], "meta_info": meta})
        return answers

    with fake_server(reply) as url:
        first, second = scored(url, [([10, 11, 12], [13, 14]), ([20], [21])])
    assert [(s.token, s.logprob) for s in first] == [(13, -1.5), (14, -2.0)]
    assert first[0].behind_best == 0.75
    assert [s.token for s in second] == [21]


class Speller:
    """A server whose greedy text counts up from each prompt's last token, except where told."""

    def __init__(self, slip=None, gap=3.0, ends=False):
        self.slip, self.gap, self.ends, self.batches = slip, gap, ends, []

    def __call__(self, path, body):
        if self.ends:
            raise RuntimeError("out of memory")
        count, answers = body["sampling_params"]["max_new_tokens"], []
        self.batches.append(len(body["input_ids"]))
        reads = count == 1  # a prefill that scores
        for row, prompt in enumerate(body["input_ids"]):
            begin = body["logprob_start_len"][row] if reads else len(prompt) - 1
            ids = prompt[begin:] if reads else [prompt[-1] + i for i in range(count + 1)]
            if self.slip and prompt[0] == self.slip[0]:
                ids[1 + self.slip[1]] = 77
            # Reading moves every logit by 0.01.
            entries = [[-0.2 + 0.01 * reads, token, None] for token in ids]
            tops = [[[p, t, None], [p - self.gap, 77, None]] for p, t, _ in entries]
            kind = "input" if reads else "output"
            entries, tops = (entries, tops) if reads else (entries[1:], tops[1:])
            meta = {f"{kind}_token_logprobs": entries, f"{kind}_top_logprobs": tops}
            meta |= {"completion_tokens": count, "spec_verify_ct": 3}
            answers.append({"output_ids": ids[1:], "meta_info": meta})
        return answers


@pytest.mark.parametrize(("gap", "right"), [(0.015, True), (0.03, False)])
def test_servers_are_compared_with_the_target(tmp_path, gap, right):
    texts = [[100 * i, 100 * i + 7] for i in range(1, 6)]
    target, same, other = Speller(gap=gap), Speller(), Speller(slip=(300, 4))
    lines = []
    with fake_server(target) as a, fake_server(same) as b, fake_server(other) as c:
        servers: Any = [
            SimpleNamespace(variant=Variant(name, "frspec"), url=url, process=None)
            for name, url in (("same", b), ("target", a), ("other", c))
        ]
        check = TextCheck(texts, batch=2, say=lines.append)
        assert check.run(servers, servers[1], tmp_path, tokens=10) is right
    # Both passes over all texts, two at a time, and one over the text that differs.
    assert target.batches == [2, 2, 2, 2, 1, 1, 1]
    assert other.batches == [2, 2, 1]
    assert check.bound == pytest.approx(0.02)
    first, second = check.verdicts
    assert (first.variant, first.same, first.differences) == ("same", 5, [])
    assert first.accept_length == pytest.approx((50 - 5) / 15)
    assert (second.variant, second.prompts, second.tokens, second.same) == ("other", 5, 50, 4)
    [found] = second.differences
    assert (found.prompt, found.position, found.plain, found.drafted) == (2, 4, 312, 77)
    assert (found.gap, found.behind) == (pytest.approx(gap), pytest.approx(gap))
    assert second.behind_after == pytest.approx([0.0] * 5)
    written = json.loads((tmp_path / "verify_text.json").read_text())
    assert [verdict["same"] for verdict in written["verdicts"]] == [5, 4]
    table = (tmp_path / "verify_text.md").read_text()
    wrong = 0 if right else 1
    assert f"| other | 5 | 4 | 3.00 | {wrong} | 5 | 5 | 0.0000 | 0 |" in table
    assert f"| other | 2 | 4 | 312 | 77 | {gap:.4f} | {gap:.4f} |" in table
    assert "4 of 5 texts of 10 tokens" in lines[-1]


def test_tokens_after_a_tie_must_be_the_targets_too(tmp_path):
    """The second slip is far behind the best token, given the text with the first."""
    target, other = Speller(gap=0.015), Speller(slip=(300, 4))
    answer = target.__call__

    def judges(path, body):
        answers = answer(path, body)
        if body["sampling_params"]["max_new_tokens"] == 1 and 77 in body["input_ids"][0]:
            answers[0]["meta_info"]["input_token_logprobs"][-2][0] -= 0.5
        return answers

    lines = []
    with fake_server(judges) as a, fake_server(other) as b:
        servers: Any = [
            SimpleNamespace(variant=Variant(name, "frspec"), url=url, process=None)
            for name, url in (("target", a), ("other", b))
        ]
        check = TextCheck([[300, 307]], batch=2, say=lines.append)
        assert not check.run(servers, servers[0], tmp_path, tokens=10)
    assert check.verdicts[0].unexplained(check.bound) == []
    assert "up to 0.5000 behind; 1 beyond rounding" in lines[-1]


def test_a_server_that_fails_is_no_agreement(tmp_path):
    lines = []
    process = SimpleNamespace(log_tail=lambda: "last words")
    with fake_server(Speller()) as a, fake_server(Speller(ends=True)) as b:
        servers: Any = [
            SimpleNamespace(variant=Variant(name, "frspec"), url=url, process=process)
            for name, url in (("target", a), ("ended", b))
        ]
        check = TextCheck([[1, 2]], batch=2, say=lines.append)
        assert not check.run(servers, servers[0], tmp_path, tokens=3)
        assert not TextCheck([[1, 2]], 2, lines.append).run(servers[:1], servers[0], tmp_path, 3)
    assert "out of memory" in lines[1]
    assert lines[2] == "last words"


# --- soak: single answers


def outcome(kind, text="", ids=(1, 2), finish="stop", abort_after=0, **sampling):
    body: dict[str, Any] = {"sampling_params": {"temperature": 0, "max_new_tokens": 8} | sampling}
    meta = {"finish_reason": {"type": finish, "matched": 2}, "completion_tokens": len(ids)}
    answer = {"text": text, "output_ids": list(ids), "meta_info": meta}
    return Outcome(Request(kind, body, abort_after), [answer])


GOOD_CITY = json.dumps({"city": "Bergen", "inhabitants": 12, "coastal": True})


@pytest.mark.parametrize(
    "good",
    [
        outcome("greedy"),
        outcome("greedy", ids=range(8), finish="length"),
        outcome("schema", GOOD_CITY),
        outcome("regex", "yes, because it is late."),
        outcome("stop", "over"),
    ],
)
def test_right_answers_pass(good):
    assert fault(good) == ""


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (outcome("greedy", ids=range(7), finish="length"), "7 tokens at the limit of 8"),
        (outcome("greedy", ids=range(9), finish="stop"), "too many tokens"),
        (outcome("greedy", finish="abort"), "finish reason 'abort'"),
        (outcome("schema", GOOD_CITY[:-4]), "not of the schema"),
        (outcome("schema", '{"city": "Bergen"}'), "not of the schema"),
        (outcome("regex", "yes, because it is late. Or"), "not of the regex"),
        (outcome("stop", "over the hill"), "goes on after its stop string"),
        (outcome("several", n=3), "1 answers to n = 3"),
        (Outcome(outcome("greedy").request, error="timed out"), "lost: timed out"),
    ],
)
def test_wrong_answers_are_told(bad, reason):
    assert reason in fault(bad)


def test_log_probabilities_must_be_of_the_answer_and_of_its_best():
    good = outcome("logprobs")
    meta = good.answers[0]["meta_info"]
    meta["output_token_logprobs"] = [[-0.1, 1, None], [-0.2, 2, None]]
    meta["output_top_logprobs"] = [[[-0.1, 1, None]], [[-0.2, 2, None]]]
    assert fault(good) == ""
    meta["output_top_logprobs"][1] = [[-0.05, 5, None], [-0.2, 2, None]]
    assert "greedy token 1 is not its own best" in fault(good)
    meta["output_token_logprobs"][0] = [-0.1, 3, None]
    assert "of other tokens" in fault(good)


def test_a_stream_that_takes_back_is_told():
    growing = outcome("stream")
    growing.chunks = [[1], [1, 2]]
    assert fault(growing) == ""
    growing.chunks = [[1, 3], [1, 2]]
    assert "takes back" in fault(growing)


def test_a_count_that_differs_from_the_tokens_is_told():
    bad = outcome("greedy")
    bad.answers[0]["meta_info"]["completion_tokens"] = 3
    assert "2 tokens, 3 counted" in fault(bad)


def test_the_mix_holds_every_kind_and_all_lengths():
    draw = random.Random(0)
    requests = [draw_request(draw, range(10_000), 1500) for _ in range(600)]
    counts = Counter(request.kind for request in requests)
    assert set(counts) == set(KINDS)
    assert min(counts.values()) >= 8
    lengths = sorted(len(request.body["input_ids"]) for request in requests)
    assert lengths[0] <= 10
    assert lengths[-1] == 1500
    assert all(request.abort_after for request in requests if request.kind == "abort")
    again = random.Random(0)
    assert requests[:50] == [draw_request(again, range(10_000), 1500) for _ in range(50)]


# --- soak: a run


class Target:
    """Answers with tokens counted up from the prompt's last, and scores accordingly."""

    def __init__(self, wrong=0):
        self.wrong, self.asked = wrong, 0
        self.asked_when_judged: list[int] = []

    def server(self, path, body):
        self.asked += 1
        sampling = body["sampling_params"]
        bad = self.asked == self.wrong
        batch = isinstance(body["input_ids"][0], list)
        prompt = body["input_ids"][0] if batch else body["input_ids"]
        ids = [prompt[-1] + 1 + i + bad for i in range(sampling["max_new_tokens"])]
        meta: dict[str, Any] = {"completion_tokens": len(ids), "finish_reason": {"type": "length"}}
        if body.get("return_logprob"):
            meta["output_token_logprobs"] = [[-0.1, token, None] for token in ids]
            meta["output_top_logprobs"] = [[[-0.1, token, None]] for token in ids]
        text = GOOD_CITY if "json_schema" in sampling else "yes, because it is late."
        answer = {"output_ids": ids, "text": text, "meta_info": meta}
        if body.get("stream"):
            open_ended = meta | {"finish_reason": None}
            chunks = [{"output_ids": ids[:i], "meta_info": open_ended} for i in range(1, len(ids))]
            return [*chunks, answer]
        return [answer] * sampling.get("n", 1) if batch or sampling.get("n") else answer

    def judge(self, path, body):
        self.asked_when_judged.append(self.asked)
        answers = []
        for ids, start in zip(body["input_ids"], body["logprob_start_len"], strict=True):
            entries, tops = [], []
            for i in range(start, len(ids)):
                right = i and ids[i] == ids[i - 1] + 1
                entries.append([-0.1 if right else -60.0, ids[i], None])
                tops.append([[-0.1 - rank, 1000 + rank, None] for rank in range(TOP_K)])
            meta = {"input_token_logprobs": entries, "input_top_logprobs": tops}
            answers.append({"output_ids": [1], "meta_info": meta})
        return answers


def soak_run(monkeypatch, target, count=60, deadline=float("inf"), processes=()):
    monkeypatch.setattr(soak, "CONCURRENCY", 1)
    monkeypatch.setattr(soak.time, "sleep", lambda seconds: None)
    process = SimpleNamespace(processes=lambda: processes, log_tail=lambda: "last words")
    with fake_server(target.server) as url, fake_server(target.judge) as judge_url:
        server: Any = SimpleNamespace(variant=Variant("x", "frspec"), url=url, process=process)
        judge: Any = SimpleNamespace(variant=Variant("y", "nospec"), url=judge_url, process=process)
        return Soak(server, judge, count, 0.1, lambda line: None, deadline).run()


def test_a_good_run_has_no_fault(monkeypatch):
    report = soak_run(monkeypatch, Target())
    assert report.faults == []
    assert sum(report.kinds.values()) == 60
    assert 0 < report.aborted <= report.kinds["abort"]
    assert report.scored_tokens > 500
    assert report.good
    assert [memory.done for memory in report.memory] == list(range(3, 61, 3))


def test_the_judge_rests_while_requests_run(monkeypatch):
    """What the GPU gains in a run is the tested server's."""
    target = Target()
    soak_run(monkeypatch, target)
    assert len(target.asked_when_judged) >= 1
    assert set(target.asked_when_judged) == {60 + 1}


def test_requests_that_come_too_late_are_not_sent_and_said(monkeypatch):
    target = Target()
    now = itertools.count()
    monkeypatch.setattr(soak.time, "monotonic", lambda: float(next(now)))
    report = soak_run(monkeypatch, target, deadline=20.0)
    assert 0 < report.unsent < 60
    assert sum(report.kinds.values()) == 60 - report.unsent
    # One asks the server whether it still answers.
    assert target.asked == 60 - report.unsent + 1
    assert not report.good
    assert f"NOT SENT, for lack of time: {report.unsent}" in report.text()


def test_one_wrong_token_and_one_refused_request_are_found(monkeypatch):
    draw = random.Random(0)
    tokens = [token for text in held_out_texts() for token in text]
    longest = min(soak.LONGEST_PROMPT, len(tokens) // 2)
    kinds = [draw_request(draw, tokens, longest).kind for _ in range(60)]
    wrong, refused = kinds.index("several"), kinds.index("stream")
    target = Target(wrong=wrong + 1)
    answer = target.server

    def refuses(path, body):
        if target.asked == refused:
            target.asked += 1
            raise RuntimeError("queue full")
        return answer(path, body)

    monkeypatch.setattr(target, "server", refuses)
    report = soak_run(monkeypatch, target)
    assert report.faults[0].startswith(f"request {refused} (stream): lost: ")
    assert "queue full" in report.faults[0]
    # Each of the three answers to one request.
    assert len(report.faults) == 4
    for reason in report.faults[1:]:
        assert reason.startswith(f"request {wrong} (several): a token is ")
        assert reason.endswith(f"behind the target's rank {TOP_K}")


SMI = """#!/bin/sh
case "$*" in
  *compute-apps*) {apps} ;;
  *) echo "143771, 100000, 43771, 5" ;;
esac
"""


@pytest.mark.parametrize(
    ("apps", "gpu"),
    [
        ('printf "11, 500\\n12, 40\\n13, 7000\\n11, 3\\n"', 543),
        ('printf "13, 7000\\n"', 43_771),  # processes of another name space
        ('printf "11, [N/A]\\n"', 43_771),
        ("exit 9", 43_771),
    ],
)
def test_memory_is_the_tested_servers_where_it_can_be_seen(monkeypatch, tmp_path, apps, gpu):
    smi = tmp_path / "nvidia-smi"
    smi.write_text(SMI.format(apps=apps))
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(soak, "resident_bytes", lambda processes: 17)
    report = soak_run(monkeypatch, Target(), count=16, processes=[11, 12])
    assert set(report.memory) == {Memory(done, gpu << 20, 17) for done in range(1, 17)}


def test_growth_counts_from_a_quarter_of_the_run_on():
    mib = 1 << 20
    memory = [
        Memory(250, 10 * mib, 100),
        Memory(500, 900 * mib, 1000),
        Memory(2000, 950 * mib, 1040),
    ]
    report = SoakReport("x", 2000, memory=memory)
    assert report.growth == (50 * mib, pytest.approx(0.04))
    assert report.flat
    memory[-1] = Memory(2000, 1000 * mib, 1040)
    assert not report.flat
    memory[-1] = Memory(2000, 900 * mib, 1060)
    assert not report.flat
    assert "GROWING" in report.text()
