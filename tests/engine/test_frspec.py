"""FRSPEC in the real engine: right tokens, the accept lengths that follow from the map."""

import json

import pytest
import torch

from tests.engine.chain_model import make_chain_model
from tests.engine.conftest import greedy

pytestmark = [pytest.mark.engine, pytest.mark.slow]

TOKENS = 40
# Beginnings of prompts; where the last token is in the chain decides what follows.
BEGINNINGS = [[5, 6], [8, 9, 10, 11], [], list(range(200, 260)), [7, 7, 7]]


def prompts_at(chain, places):
    tokens = chain.order[torch.tensor(places)].tolist()
    return [[*beginning, token] for beginning, token in zip(BEGINNINGS, tokens, strict=True)]


def frspec(chain, steps, top_k, nodes):
    return {
        "speculative_algorithm": "FRSPEC",
        "speculative_token_map": str(chain.token_map),
        "speculative_num_steps": steps,
        "speculative_eagle_topk": top_k,
        "speculative_num_draft_tokens": nodes,
    }


@pytest.mark.parametrize(("top_k", "nodes"), [(3, 10), (1, 4)], ids=["tree", "chain"])
def test_known_tokens_and_known_cycles(run_engine, tmp_path, top_k, nodes):
    tied = top_k == 1
    chain = make_chain_model(tmp_path, hot_share=0.7, tied=tied, seed=top_k)
    prompts = prompts_at(chain, [0, 50, 150, 250, 400])
    [answers] = run_engine(chain, [prompts], TOKENS, **frspec(chain, 3, top_k, nodes))
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer["ids"] == chain.continuation(prompt[-1], TOKENS)
        assert answer["cycles"] == len(chain.cycle_lengths(prompt[-1], TOKENS, 3))


@pytest.mark.parametrize("stock", [["head", "accept"], ["tree"]], ids=",".join)
def test_pieces_left_to_sglang_change_nothing(run_engine, tmp_path, monkeypatch, stock):
    monkeypatch.setenv("FRSPEC_CONFIG", json.dumps({"stock": stock}))
    chain = make_chain_model(tmp_path, hot_share=0.7, seed=len(stock))
    prompts = prompts_at(chain, [0, 50, 150, 250, 400])
    [answers] = run_engine(chain, [prompts], TOKENS, **frspec(chain, 3, 3, 10))
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer["ids"] == chain.continuation(prompt[-1], TOKENS)
        assert answer["cycles"] == len(chain.cycle_lengths(prompt[-1], TOKENS, 3))


def test_output_does_not_depend_on_speculation(run_engine, tmp_path):
    """Attention decides tokens here, drafts are often wrong, and prefixes repeat."""
    chain = make_chain_model(tmp_path, hot_share=0.5, context=0.6, noise=0.08, seed=12)
    # The second batch finds its prompts, and what was generated after them, in the prefix cache.
    prompts = prompts_at(chain, [0, 50, 150, 250, 400])
    repeated = [[*prompts[3], 9], prompts[3], [*prompts[1], 3]]
    batches = [prompts, repeated]
    plain = run_engine(chain, batches, TOKENS)
    drafted = run_engine(chain, batches, TOKENS, **frspec(chain, 3, 4, 12))
    assert [[a["ids"] for a in batch] for batch in drafted] == [
        [a["ids"] for a in batch] for batch in plain
    ]
    expected = [[greedy(chain, prompt, TOKENS) for prompt in batch] for batch in batches]
    assert [[a["ids"] for a in batch] for batch in plain] == expected
    cycles = [a["cycles"] for batch in drafted for a in batch]
    # Neither always right nor always wrong: both acceptance and rejection are exercised.
    assert 1.3 < TOKENS * len(cycles) / sum(cycles) < 3, cycles
    outputs = [ids for batch in expected for ids in batch]
    # One prompt runs into a token that repeats itself; what follows from the others varies.
    assert sum(len(set(ids)) > 10 for ids in outputs) >= 7
    # Attention led away from the chain, which a draft without attention cannot know.
    places = torch.argsort(chain.order)
    steps = torch.tensor(outputs).apply_(lambda token: int(places[token])).diff()
    assert int((steps % len(chain.order) != 1).sum()) > 30
