"""One engine as a user sees it: a cut map, streamed answers, and what the log says about memory."""

import dataclasses
import itertools
import json
import re

import pytest
import torch

from tests.engine.chain_model import HEAD_DIM, HIDDEN, KV_HEADS, make_chain_model
from tests.engine.conftest import ENGINE, engine_process
from tests.engine.run_engine import MARK

pytestmark = [pytest.mark.engine, pytest.mark.slow]

SIZE, STEPS, TOKENS = 192, 3, 30
END_OF_TEXT = 1  # the model's eos_token_id: always drafted over


@pytest.fixture(scope="module")
def outcome(tmp_path_factory, monkeypatch_module):
    folder = tmp_path_factory.mktemp("streaming")
    chain = make_chain_model(folder, hot_share=0.7, tied=True, seed=40)
    # In rank order the file holds the highest ids first.
    ranked = [i for i in torch.load(chain.token_map) if i != END_OF_TEXT]
    torch.save(ranked, chain.token_map)
    monkeypatch_module.setenv("FRSPEC_CONFIG", json.dumps({"map_size": SIZE}))
    engine = ENGINE | {
        "model_path": str(chain.target),
        "speculative_draft_model_path": str(chain.draft),
        "speculative_algorithm": "FRSPEC",
        "speculative_token_map": str(chain.token_map),
        "speculative_num_steps": STEPS,
        "speculative_eagle_topk": 2,
        "speculative_num_draft_tokens": 7,
        "decode_log_interval": 1,
        "enable_metrics": True,
    }
    prompt = chain.order[20:25].tolist()
    sampling = {"max_new_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    hot = torch.zeros_like(chain.hot)
    hot[ranked[: SIZE - 1]] = True
    hot[END_OF_TEXT] = True
    chain = dataclasses.replace(chain, hot=hot)
    stop = chain.continuation(prompt[-1], _inside_a_cycle(chain, prompt[-1]))[-1]
    stopping = sampling | {"ignore_eos": False, "stop_token_ids": [stop]}
    streams = [
        {"input_ids": prompt, "sampling_params": sampling},
        {"input_ids": prompt, "sampling_params": stopping},
    ]
    job = {"engine": engine, "sampling": sampling, "batches": [], "streams": streams}
    done = engine_process(job, folder / "job")
    lines = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
    assert lines, done.stdout[-3000:] + done.stderr[-5000:]
    found = json.loads(lines[-1].removeprefix(MARK))
    return chain, prompt, found["streams"], done.stderr + done.stdout, found["metrics"]


def _inside_a_cycle(chain, token):
    """How many tokens have come when all but one of a cycle of three or more have."""
    cycles = chain.cycle_lengths(token, TOKENS, STEPS)
    first = next(i for i, length in enumerate(cycles) if length >= 3)
    return 1 + sum(cycles[:first]) + cycles[first] - 1


@pytest.fixture(scope="module")
def monkeypatch_module():
    with pytest.MonkeyPatch.context() as patch:
        yield patch


def test_each_cycle_is_streamed_as_it_ends(outcome):
    chain, prompt, (chunks, _), *_ = outcome
    expected = chain.continuation(prompt[-1], TOKENS)
    ends = itertools.accumulate([1, *chain.cycle_lengths(prompt[-1], TOKENS, STEPS)])
    lengths = [min(end, TOKENS) for end in ends]
    assert len(set(lengths)) > 10
    assert chunks[-1] == expected
    # On a busy machine the answer's next cycle may be there before a chunk has been fetched.
    received = [len(chunk) for chunk in chunks]
    assert received == sorted(received)
    assert set(received) <= set(lengths)
    assert len(set(received)) > len(set(lengths)) / 2
    assert all(chunk == expected[: len(chunk)] for chunk in chunks)


def test_a_stop_inside_a_cycle_ends_the_answer_there(outcome):
    chain, prompt, (_, chunks), *_ = outcome
    assert chunks[-1] == chain.continuation(prompt[-1], _inside_a_cycle(chain, prompt[-1]))


def test_the_head_is_gathered_before_the_pool_is_sized(outcome):
    log = outcome[3]
    head = log.index(f"FRSPEC draft head: {SIZE} x {HIDDEN}")
    assert head < log.index("KV Cache is allocated")
    assert log.count("FRSPEC draft head") == 1
    # The draft's head is tied; a token takes keys and values of one layer of target and draft.
    freed, kept, token = 512 * HIDDEN * 4, SIZE * HIDDEN * 4, 2 * 2 * KV_HEADS * HEAD_DIM * 4
    assert (
        f"FRSPEC freed {freed / 2**20:.1f} MB of the draft's embedding and head before the KV"
        f" cache was sized, for a head of {kept / 2**20:.1f} MB: +{(freed - kept) // token} tokens"
        " against EAGLE without --max-total-tokens"
    ) in log


def test_the_log_says_how_well_the_map_fits(outcome):
    chain, prompt, _, log, _ = outcome
    cycles = chain.cycle_lengths(prompt[-1], TOKENS, STEPS)[:-1]
    tokens = iter(chain.continuation(prompt[-1], TOKENS)[1:])
    expected = []
    for length in cycles:
        outside = sum(not chain.hot[token] for token in itertools.islice(tokens, length))
        expected.append((f"{length:.2f}", f"{100 * outside / length:.2f}"))
    pattern = r"FRSPEC: accept length ([\d.]+), tokens outside the map ([\d.]+)%"
    assert re.findall(pattern, log)[: len(cycles)] == expected
    assert len(set(expected)) == 3  # ends at once, after one draft, after two


def test_metrics_count_what_rounds_yield(outcome):
    """Every round but the last, which nothing has asked about yet."""
    chain, prompt, *_, metrics = outcome
    whole = chain.cycle_lengths(prompt[-1], TOKENS, STEPS)
    stopped = next(i for i, length in enumerate(whole) if length >= 3)
    expected = {"cycles": 0, "tokens": 0, "outside_map": 0}
    for cycles in (whole, whole[:stopped]):
        tokens = chain.continuation(prompt[-1], 1 + sum(cycles))[1:]
        expected["cycles"] += len(cycles)
        expected["tokens"] += len(tokens)
        expected["outside_map"] += sum(not chain.hot[token] for token in tokens)
    assert min(expected.values()) > 0
    for name, value in expected.items():
        pattern = rf'^sglang:frspec_{name}_total{{model_name="[^"]*"}} (.*)$'
        assert [float(found) for found in re.findall(pattern, metrics, re.M)] == [value]


def test_what_the_map_lacked_is_said(outcome):
    log = outcome[3]
    assert f"FRSPEC drafts over {SIZE} of 512 tokens" in log
    assert f"turn, special tokens): {END_OF_TEXT}." in log
