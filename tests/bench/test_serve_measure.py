"""What is timed and counted, against a server that answers as told."""

import itertools
import time
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest

from bench.serving.chain import make_chain
from bench.serving.client import Answer, RequestFailedError, generate
from bench.serving.measure import Lengths, Sample, accept_length, take_turns
from bench.serving.prompts import ChainPrompts, RealPrompts, Workload
from bench.serving.variants import Variant
from tests.bench.fake_server import fake_server

CHAIN = make_chain(4096, 2048, 0.8)
PER_ROUND, ROUND_S = 4, 0.004
LENGTHS = Lengths(9, 41)


def chain_reply(path, body):
    """Answers by the chain, four tokens a round."""
    new = body["sampling_params"]["max_new_tokens"]
    rounds = -(-(new - 1) // PER_ROUND)
    time.sleep(0.02 + rounds * ROUND_S)
    answers = []
    for prompt in body["input_ids"]:
        start = int((CHAIN.order == prompt[-1]).nonzero()) + 1
        ids = [int(CHAIN.order[(start + i) % len(CHAIN.order)]) for i in range(new)]
        meta = {"completion_tokens": new, "spec_verify_ct": rounds}
        answers.append({"output_ids": ids, "text": "", "meta_info": meta})
    return answers


def server(name, url) -> Any:
    process = SimpleNamespace(log_tail=lambda: f"last words of {name}")
    return SimpleNamespace(variant=Variant(name, "eagle"), url=url, process=process)


def run(replies, alternations=2, lengths=LENGTHS):
    said: list[str] = []
    with ExitStack() as stack:
        servers = [
            server(name, stack.enter_context(fake_server(reply))) for name, reply in replies.items()
        ]
        samples = take_turns(
            servers, Workload(2, 20), ChainPrompts(CHAIN), lengths, alternations, said.append
        )
    return samples, said


def test_rounds_tokens_and_accept_length():
    samples, said = run({"a": chain_reply})
    assert not said
    assert len(samples["a"]) == 2
    for sample in samples["a"]:
        assert sample.rounds == 10 - 2
        assert sample.tokens == 2 * (41 - 9)
        assert sample.accept_length == 4.0
        assert sample.wrong == 0
        # What both answers have in common has dropped out; a sleep is never shorter than asked.
        assert sample.ms_per_round >= 0.5 * ROUND_S * 1e3
        assert sample.tokens_per_second == pytest.approx(sample.tokens / sample.ms * 1e3)


def test_servers_take_turns_and_the_first_turn_is_not_counted():
    order = []

    def reply_as(name):
        def reply(path, body):
            order.append(name)
            return chain_reply(path, body)

        return reply

    samples, _ = run({"a": reply_as("a"), "b": reply_as("b")}, alternations=3)
    # A request that wakes it, a short and a long answer each; the order turns round every time.
    assert "".join(order) == "bbbaaaaaabbb" * 2
    assert {name: len(found) for name, found in samples.items()} == {"a": 3, "b": 3}


def test_what_waking_up_takes_is_not_timed():
    others = itertools.count()

    def reply(path, body):
        if next(others) % 3 == 0:  # the first request of each turn
            time.sleep(0.3)
        return chain_reply(path, body)

    samples, _ = run({"a": reply})
    for sample in samples["a"]:
        assert 0.5 * 8 * ROUND_S * 1e3 <= sample.ms < 200


def test_a_slow_servers_answers_are_cut_but_not_below_the_least():
    asked = []

    def slow(path, body):
        asked.append(body["sampling_params"]["max_new_tokens"])
        time.sleep(0.002 * asked[-1])
        return chain_reply(path, body)

    # About 3 ms a token, so 25 and more of 200 tokens take the 90 ms; the least are 6 x 5.
    samples, _ = run({"slow": slow}, alternations=1, lengths=Lengths(5, 200, enough_ms=90.0))
    assert asked[:3] == [5, 5, 30]
    assert asked[3:5] == [5, 5]
    assert asked[5] == samples["slow"][0].answer_tokens
    assert 30 <= asked[5] < 50


@pytest.mark.parametrize(
    ("ms_per_token", "tokens"), [(1.0, 105), (0.1, 300), (50.0, 30), (0.0, 300), (-1.0, 300)]
)
def test_how_far_an_answer_is_cut(ms_per_token, tokens):
    assert Lengths(5, 300, enough_ms=100.0).cut(ms_per_token) == Lengths(5, tokens, 100.0)
    assert Lengths(5, 300).cut(ms_per_token) == Lengths(5, 300)
    assert Lengths(5, 20, enough_ms=100.0).least == 20


def test_a_wrong_token_is_counted_in_both_answers():
    def lies(path, body):
        answers = chain_reply(path, body)
        answers[1]["output_ids"][5] += 1
        return answers

    samples, said = run({"a": lies})
    assert [sample.wrong for sample in samples["a"]] == [2, 2]
    assert said == ["a: 2 of 2 WRONG"]


def test_a_server_that_fails_is_left_out_with_its_last_words():
    asked = itertools.count()

    def dies(path, body):
        if next(asked) >= 6:
            raise RuntimeError("out of memory")
        return chain_reply(path, body)

    samples, said = run({"a": dies, "b": chain_reply}, alternations=3)
    assert {name: len(found) for name, found in samples.items()} == {"a": 1, "b": 3}
    assert len(said) == 1
    assert "out of memory" in said[0]
    assert "last words of a" in said[0]


def test_accept_length_without_speculation_is_one():
    answers = [Answer(list(range(10)), 0, 0, {}), Answer(list(range(5)), 0, 0, {})]
    assert accept_length(answers) == 1.0
    assert accept_length([Answer(list(range(9)), 4, 4, {}), Answer(list(range(5)), 1, 3, {})]) == (
        (8 + 4) / 5
    )


def test_sample_arithmetic():
    sample = Sample(ms=120.0, rounds=40, tokens=300, accept_length=2.5, wrong=0, answer_tokens=160)
    assert sample.ms_per_round == 3.0
    assert sample.tokens_per_second == 2500.0


def test_expected_accept_length_is_the_chains():
    prompts = ChainPrompts(CHAIN)
    full = prompts.expected_accept(Workload(1, 10), 257, 3, mapped=False)
    mapped = prompts.expected_accept(Workload(1, 10), 257, 3, mapped=True)
    assert full == 4.0
    assert mapped is not None
    assert mapped == 256 / CHAIN.cycles(0, 257, 3, True)
    assert mapped < 4


def test_real_prompts_are_as_long_as_asked_and_differ():
    prompts = RealPrompts().of(Workload(16, 3000))
    assert {len(prompt) for prompt in prompts} == {3000}
    assert len({tuple(prompt) for prompt in prompts}) == 16


def test_a_refusal_carries_the_servers_words():
    def refuses(path, body):
        raise ValueError("the input is too long")

    with fake_server(refuses) as url, pytest.raises(RequestFailedError, match="input is too long"):
        generate(url, [[1, 2]], 4)


def test_a_server_that_is_gone_is_a_failed_request():
    with fake_server(chain_reply) as url:
        pass
    with pytest.raises(RequestFailedError, match="refused"):
        generate(url, [[1, 2]], 4)
