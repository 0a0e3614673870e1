"""What requests can ask for, answered by FRSPEC as by stock EAGLE over the same map.

One engine each, with the same weights, map, tree and requests. Tokens, texts, reasons to end,
cycles and cached tokens must be equal; log probabilities and hidden states up to rounding. Drafts
are often wrong, attention decides tokens, and prompts are prefilled in chunks.
"""

import json
import re
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.engine.byte_tokenizer import write_tokenizer
from tests.engine.chain_model import make_chain_model
from tests.engine.conftest import ENGINE, engine_process, greedy
from tests.engine.feature_requests import (
    ASKED,
    PENALTIES,
    REGEX,
    TOKENS,
    crowd,
    requests,
    sampling,
)
from tests.engine.run_engine import MARK

pytestmark = [pytest.mark.engine, pytest.mark.slow]

VOCAB, CHUNK = 512, 64
STOCK, OURS = "EAGLE", "FRSPEC"
# Two orders of summation in float32, absolute and relative.
ROUNDING = 1e-4
LAYOUTS = {"tree": (3, 10, 1), "chain": (1, 4, 4)}  # top-k, nodes, page size


@pytest.fixture(scope="module")
def chain(tmp_path_factory):
    chain = make_chain_model(
        tmp_path_factory.mktemp("chain"), hot_share=0.7, context=0.5, noise=0.06, seed=9
    )
    file = chain.target / "model.safetensors"
    tensors = load_file(file)
    # Logits that penalties and biases can change.
    tensors["lm_head.weight"] /= 18.0
    save_file(tensors, file, metadata={"format": "pt"})
    # Both algorithms draft over the same ids: FRSPEC would add missing ends of text itself.
    ranked = [0, 1, *(i for i in torch.load(chain.token_map) if i > 1)]
    torch.save(ranked, chain.token_map)
    return chain


@pytest.fixture(scope="module")
def prompts():
    g = torch.Generator().manual_seed(4)
    return [torch.randint(2, VOCAB, (n,), generator=g).tolist() for n in (5, 150, 9, 70, 30)]


@pytest.fixture(scope="module")
def stop(chain, prompts):
    """Two tokens of the first answer, as text, and how many tokens it has up to their end."""
    tokenizer = write_tokenizer(chain.target, VOCAB)
    texts = [str(tokenizer.decode([token])) for token in greedy(chain, prompts[0], TOKENS)]
    end = next(i for i in range(8, TOKENS) if "".join(texts[i - 2 : i]).isalpha())
    assert "".join(texts[end - 2 : end]) not in "".join(texts[: end - 1])
    return "".join(texts[end - 2 : end]), end


@pytest.fixture(scope="module", params=LAYOUTS)
def both(request, chain, prompts, stop, tmp_path_factory):
    """All answers of stock EAGLE and of FRSPEC."""
    top_k, nodes, page = LAYOUTS[request.param]
    engine = ENGINE | {
        "model_path": str(chain.target), "speculative_draft_model_path": str(chain.draft),
        "speculative_token_map": str(chain.token_map), "speculative_num_steps": 3,
        "speculative_eagle_topk": top_k, "speculative_num_draft_tokens": nodes,
        "page_size": page, "chunked_prefill_size": CHUNK, "skip_tokenizer_init": False,
        "grammar_backend": "xgrammar", "constrained_json_disable_any_whitespace": True,
        "enable_return_hidden_states": True, "max_total_tokens": 1200,
        "schedule_conservativeness": 0.01,
    }  # fmt: skip
    job = {
        "batches": [],
        "requests": requests(prompts, stop[0]),
        "abort": {
            "request": {"input_ids": prompts[1], "sampling_params": sampling(max_new_tokens=300)},
            "chunks": 3,
            "beside": {"input_ids": prompts[3], "sampling_params": sampling(max_new_tokens=90)},
        },
    }

    def answers(algorithm):
        own = job | {"engine": engine | {"speculative_algorithm": algorithm}, "sampling": None}
        done = engine_process(own, folder / algorithm)
        lines = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
        assert lines, done.stdout[-3000:] + done.stderr[-5000:]
        return json.loads(lines[-1].removeprefix(MARK))

    folder = tmp_path_factory.mktemp("engines")
    with ThreadPoolExecutor(2) as pool:
        found = dict(zip((STOCK, OURS), pool.map(answers, (STOCK, OURS)), strict=True))
    return found | {"page size": page}


def all_of(both, name):
    """Pairs of stock's and our answers to one call."""
    pair = [both[algorithm]["whole"][name] for algorithm in (STOCK, OURS)]
    return list(zip(*(a if isinstance(a, list) else [a] for a in pair), strict=True))


def facts(answer):
    meta = answer["meta_info"]
    named = ("finish_reason", "completion_tokens", "spec_verify_ct", "cached_tokens")
    return answer["output_ids"], answer["text"], {name: meta[name] for name in named}


@pytest.mark.parametrize("name", requests([[2]] * 5, "stop"))
def test_answers_are_stock_eagles(both, name):
    pairs = all_of(both, name)
    for stock, ours in pairs[1:] if name == "beside a sampled one" else pairs:
        if name == "crowd":  # which of them lose their place is a matter of time
            assert (ours["output_ids"], ours["text"]) == (stock["output_ids"], stock["text"])
        else:
            assert facts(ours) == facts(stock)


def test_drafts_are_accepted_and_rejected(both):
    cycles = [ours["meta_info"]["spec_verify_ct"] for _, ours in all_of(both, "prompts")]
    assert 1.3 < len(cycles) * (TOKENS - 1) / sum(cycles) < 3.5


def test_answers_are_the_targets(both, chain, prompts):
    for prompt, (_, ours) in zip(prompts, all_of(both, "prompts"), strict=True):
        assert ours["output_ids"] == greedy(chain, prompt, TOKENS)


def test_prefixes_are_found_again(both, prompts):
    """All but the last token of each prompt, in whole pages."""
    page = both["page size"]
    for prompt, (_, ours) in zip(prompts, all_of(both, "longer prompts"), strict=True):
        assert ours["meta_info"]["cached_tokens"] == (len(prompt) - 1) // page * page


def test_n_answers_to_one_request(both, chain, prompts):
    expected = greedy(chain, prompts[0], TOKENS)
    assert [ours["output_ids"] for _, ours in all_of(both, "n")] == [expected] * 3


def test_stop_strings_inside_cycles(both, stop):
    text, tokens = stop
    [[_, cut]], [[_, kept]] = all_of(both, "stop string"), all_of(both, "stop string kept")
    [[_, pattern]] = all_of(both, "stop pattern")
    assert text not in cut["text"]
    assert kept["text"] == cut["text"] + text == pattern["text"]
    assert cut["meta_info"]["finish_reason"] == {"type": "stop", "matched": text}
    assert {a["meta_info"]["completion_tokens"] for a in (cut, kept, pattern)} == {tokens}


def test_log_probabilities(both):
    for stock, ours in all_of(both, "log probabilities"):
        for kind in ("input", "output"):
            for name in ("token_logprobs", "top_logprobs", "token_ids_logprobs"):
                expected, found = (a["meta_info"][f"{kind}_{name}"] for a in (stock, ours))
                assert tokens_of(found) == tokens_of(expected)
                assert_close(values_of(found), values_of(expected))
        meta = ours["meta_info"]
        assert [entry[1] for entry in meta["output_token_logprobs"]] == ours["output_ids"]
        assert [entry[:2] for entry in meta["output_token_logprobs"]] == [
            top[0][:2] for top in meta["output_top_logprobs"]
        ]


def leaves(entries):
    """Entries ``(log probability, token, …)``, of which some are in lists of several."""
    for entry in entries or ():
        if entry and isinstance(entry[0], list):
            yield from leaves(entry)
        elif entry:
            yield entry


def assert_close(found, expected):
    pair = torch.tensor(found), torch.tensor(expected)
    torch.testing.assert_close(*pair, rtol=ROUNDING, atol=ROUNDING)


def tokens_of(entries):
    return [entry[1] for entry in leaves(entries)]


def values_of(entries):
    return [float("-inf") if entry[0] is None else entry[0] for entry in leaves(entries)]


def test_hidden_states(both):
    [[stock, ours]] = all_of(both, "hidden states")
    expected, found = (a["meta_info"]["hidden_states"] for a in (stock, ours))
    assert len(found) == len(expected) > TOKENS / 2
    for a, b in zip(found, expected, strict=True):
        assert_close(a, b)


@pytest.mark.parametrize("name", ASKED)
def test_what_is_asked_changes_the_answer_alone_and_in_company(both, name):
    place = list(ASKED).index(name)
    [[_, alone]] = all_of(both, name)
    company = all_of(both, "one batch")[place][1]
    beside = all_of(both, "beside a sampled one")[place + 1][1]
    assert alone["output_ids"] == company["output_ids"] == beside["output_ids"]
    # Each lacks one thing that the answer asked for.
    without = {"no end before": "end of text"} | dict.fromkeys(PENALTIES, "bias")
    other = all_of(both, without[name])[0] if name in without else all_of(both, "prompts")[2]
    assert alone["output_ids"] != other[1]["output_ids"]


def test_ends_of_text(both):
    [[_, early]], [[_, late]] = all_of(both, "end of text"), all_of(both, "no end before")
    assert early["output_ids"][-1] == 1
    assert 1 not in early["output_ids"][:-1]
    assert early["meta_info"]["completion_tokens"] < 20 <= late["meta_info"]["completion_tokens"]


def test_grammars(both):
    [[_, schema]], [[_, regex]] = all_of(both, "schema"), all_of(both, "regex")
    value = json.loads(schema["text"])
    assert set(value) == {"a", "b"}
    assert value["a"] <= 9999
    assert value["b"] in ("on", "off")
    assert re.fullmatch(REGEX, regex["text"])
    assert {a["meta_info"]["finish_reason"]["type"] for a in (schema, regex)} == {"stop"}


def test_requests_that_the_cache_cannot_hold_at_once(both, chain, prompts):
    """Some lose their place in the cache on the way, and go on where they were."""
    found = [ours for _, ours in all_of(both, "crowd")]
    retracted = [i for i, ours in enumerate(found) if ours["meta_info"]["num_retractions"]]
    assert retracted
    for i in retracted:
        ids = found[i]["output_ids"]
        assert len(ids) == 180 or ids[-1] == 1
        assert ids == greedy(chain, crowd(prompts)[i], len(ids))


def test_an_aborted_request_leaves_the_others_and_the_cache_whole(both, chain, prompts):
    for algorithm in (STOCK, OURS):
        found = both[algorithm]
        aborted, again = found["whole"]["aborted"], found["whole"]["again"]
        assert aborted["meta_info"]["finish_reason"]["type"] == "abort"
        length = len(aborted["output_ids"])
        assert 3 <= length < 300
        assert aborted["output_ids"] == again["output_ids"][:length]
        assert len(again["output_ids"]) == 300
    for name in ("beside", "again"):
        [[stock, ours]] = all_of(both, name)
        assert facts(ours) == facts(stock)
    assert both[OURS]["whole"]["beside"]["output_ids"][:TOKENS] == greedy(chain, prompts[3], TOKENS)
