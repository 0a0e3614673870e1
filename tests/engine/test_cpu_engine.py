"""SGLang's own EAGLE on the CPU engine, and layouts of the KV cache that only whole runs show."""

import math

import pytest

from tests.engine.chain_model import make_chain_model
from tests.engine.conftest import greedy

pytestmark = [pytest.mark.engine, pytest.mark.slow]

TOKENS, STEPS = 41, 4


def prompts_at(chain):
    """Prompts of several lengths, each the start of a stretch of the chain that is long enough."""
    places = ((0, 3), (50, 1), (120, 17), (300, 60))
    return [chain.order[place : place + length].tolist() for place, length in places]


def eagle(algorithm, top_k, nodes):
    return {
        "speculative_algorithm": algorithm,
        "speculative_num_steps": STEPS,
        "speculative_eagle_topk": top_k,
        "speculative_num_draft_tokens": nodes,
    }


@pytest.mark.parametrize(("top_k", "nodes"), [(4, 16), (1, 5)], ids=["tree", "chain"])
def test_stock_eagle_accepts_every_right_draft(run_engine, tmp_path, top_k, nodes):
    """The draft is always right, so each cycle yields all steps and the bonus."""
    chain = make_chain_model(tmp_path, seed=top_k + 20)
    prompts = prompts_at(chain)
    [answers] = run_engine(chain, [prompts], TOKENS, **eagle("EAGLE", top_k, nodes))
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer["ids"] == chain.continuation(prompt[-1], TOKENS)
        assert answer["cycles"] == math.ceil((TOKENS - 1) / (STEPS + 1))


def test_branches_on_pages_of_their_own(run_engine, tmp_path):
    """Pages of four slots, drafts that are often wrong, attention that decides the tokens."""
    chain = make_chain_model(tmp_path, hot_share=0.8, context=0.5, noise=0.08, seed=31)
    options = eagle("FRSPEC", 3, 10) | {
        "speculative_token_map": str(chain.token_map),
        "page_size": 4,
    }
    prompts = prompts_at(chain)
    [answers] = run_engine(chain, [prompts], TOKENS, **options)
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer["ids"] == greedy(chain, prompt, TOKENS)
    cycles = [answer["cycles"] for answer in answers]
    assert all(TOKENS / (STEPS + 1) < count < TOKENS - 2 for count in cycles), cycles
