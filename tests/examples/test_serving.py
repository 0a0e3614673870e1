"""What the demonstration and the table of accept lengths compute and print."""

import io
import json

import pytest

from examples.smollm2_135m import accept_table, demo, report, serving
from examples.smollm2_135m.accept_summary import Answers, markdown, summarise
from examples.smollm2_135m.prompts import Prompt
from examples.smollm2_135m.serving import (
    FULL_VOCABULARY,
    NO_SPECULATION,
    Drafting,
    Reply,
    frspec,
)
from sgl_frspec.maps import load_token_map
from sgl_frspec.serve import ServerCommand


def reply(ids, cycles=0, accepted=0, text=""):
    return Reply(ids, text, cycles, accepted)


def test_accept_length_pools_cycles():
    assert serving.accept_length([reply([1], 10, 30), reply([2], 30, 10)]) == 2.0
    assert serving.accept_length([reply([1])]) is None


def test_outside_share_counts_tokens():
    assert serving.outside_share([reply([1, 2, 3]), reply([4])], {1, 2, 3}) == 0.25


@pytest.mark.parametrize(
    ("a", "b", "at"),
    [([1, 2], [1, 2], None), ([1, 2], [1, 3], 1), ([1], [1, 2], 1), ([], [], None), ([5], [], 0)],
)
def test_first_difference(a, b, at):
    assert serving.first_difference(a, b) == at


def test_hot_ids_are_the_best_ranked_with_the_end_of_turn():
    token_map = load_token_map(serving.TOKEN_MAP)
    hot = serving.hot_ids(16384)
    assert len(hot) == 16384
    assert set(token_map.metadata.required_ids) <= hot
    assert len(hot & set(token_map.ids[:16384].tolist())) >= 16384 - len(
        token_map.metadata.required_ids
    )


@pytest.mark.parametrize(("device", "dtype"), [("cpu", "float32"), ("gpu", "float16")])
def test_a_gpu_serves_float16(monkeypatch, device, dtype):
    """SGLang's RMSNorm kernel takes no float32."""
    command = ServerCommand([], {}, device)
    monkeypatch.setattr(serving, "server_command", lambda flags: command)
    assert serving.served_dtype() == dtype


def test_flags_differ_by_the_drafting_only(tmp_path):
    plain = serving.server_flags(tmp_path, NO_SPECULATION, 1, "float32")
    for drafting in (FULL_VOCABULARY, frspec(16384)):
        flags = serving.server_flags(tmp_path, drafting, 1, "float32")
        assert [flag for flag in flags if flag not in drafting.flags] == [
            flag for flag in plain if flag not in drafting.flags
        ]
    flags = frspec(16384).flags
    assert flags[flags.index("--frspec-map-size") + 1] == "16384"


def test_cycles_are_told_apart_in_a_file():
    out = io.StringIO()
    writer = report.CycleWriter(out)
    for text in ("One", "One two", "One two", "One two three."):
        writer.write(text)
    writer.end(reply([1, 2, 3, 4], 2, 1))
    assert out.getvalue().startswith("One| two| three.\n  [4 tokens in 2 cycles")
    assert "1.50 tokens per cycle" in out.getvalue()


def test_table_says_which_texts_differ():
    plain = [reply([1, 2, 3])]
    table = report.table(
        {"same": [reply([1, 2, 3], 2, 1)], "other": [reply([1, 9, 3], 1, 2)], "plain": plain},
        {1, 2},
    )
    rows = {line.split()[0]: line.split()[1:] for line in table.splitlines() if line.split()}
    assert rows["same"] == ["1.50", "2", "3", "33.3%", "yes"]
    assert rows["other"] == ["3.00", "1", "3", "66.7%", "NO"]
    assert rows["plain"] == ["1", "3", "3", "33.3%", "yes"]


def test_compare_names_prompt_and_token():
    replies = {
        frspec(16384): [reply([1, 2]), reply([3, 4, 5])],
        NO_SPECULATION: [reply([1, 2]), reply([3, 4, 6])],
    }
    [line] = demo.compare(replies)
    assert "FRSPEC, 16,384 ids, prompt 2, from token 2: [5] instead of [6]" in line


def test_demo_prompts_cover_all_domains():
    prompts = demo.eval_prompts()
    domains = [prompts[i].domain for i in demo.PROMPT_IDS]
    assert {domain: domains.count(domain) for domain in set(domains)} == {
        prompt.domain: 2 for prompt in prompts
    }


def test_kept_batches_are_used_until_something_changes(tmp_path):
    made = []

    def answer():
        made.append(1)
        return [reply([1, 2], 2, 1, "text")]

    for state, runs in (("a", 1), ("a", 1), ("b", 2), ("b", 2)):
        store = accept_table.Store(tmp_path, state)
        assert store.batch("key", answer) == [reply([1, 2], 2, 1, "text")]
        assert len(made) == runs


@pytest.fixture
def answers():
    prompts = [Prompt("a", "chat"), Prompt("b", "chat"), Prompt("c", "code")]
    plain = [reply([1, 2]), reply([3]), reply([4, 5])]
    full = [reply([1, 2], 10, 10), reply([3], 10, 30), reply([4, 5], 20, 20)]
    cut = [reply([1, 2], 20, 10), reply([3], 20, 30), reply([4, 6], 20, 10)]
    replies = {NO_SPECULATION.title: plain, "full": full, "cut": cut}
    return Answers(prompts, replies, NO_SPECULATION.title)


def test_summary(answers, monkeypatch):
    monkeypatch.setattr(
        "examples.smollm2_135m.accept_summary.hot_ids", lambda size: {16: {1, 2, 3, 4}}[size]
    )
    draftings = [Drafting("full"), Drafting("cut", map_size=16)]
    summary = summarise(answers, draftings, draftings[0])
    rows = {(row["drafting"], row["domain"]): row for row in summary["rows"]}
    assert rows["full", "chat"]["accept_length"] == 3.0
    assert rows["full", "all"]["accept_length"] == 2.5
    assert rows["cut", "chat"]["of_full_vocabulary"] == pytest.approx(2.0 / 3.0)
    assert rows["cut", "all"]["outside_map"] == pytest.approx(1 / 5)
    assert summary["compared_replies"] == 6
    assert summary["differences"] == [{"drafting": "cut", "prompt": 2, "token": 1}]
    assert json.loads(json.dumps(summary)) == summary
    text = markdown(summary)
    assert "| chat | 2 | 3.000 | 2.000 (66.7%; 0.0%) |" in text
    assert "5 of 6" in text
    assert "- differs: cut, prompt 2, token 1" in text
