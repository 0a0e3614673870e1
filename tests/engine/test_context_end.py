"""Requests that go on to the end of the context: right to the last token, and so are the others.

A round reserves slots for two whole trees behind each request. Where the rows of the table of slots
are too short for them, they would land in the next request's row.
"""

import pytest

from tests.engine.chain_model import make_chain_model
from tests.engine.conftest import greedy

pytestmark = [pytest.mark.engine, pytest.mark.slow]

CONTEXT = 48
# Drafted slots (steps x top-k) exceed the verified ones, so both lengths matter.
TREE = {
    "speculative_num_steps": 3,
    "speculative_eagle_topk": 4,
    "speculative_num_draft_tokens": 7,
}


def test_every_token_up_to_the_end_of_the_context(run_engine, tmp_path):
    chain = make_chain_model(tmp_path, hot_share=0.7, context=0.5, noise=0.06, seed=9)
    # Requests get neighbouring rows. They reach the end one after another.
    prompts = [list(range(100 * i + 5, 100 * i + 8 + 5 * i)) for i in range(4)]
    [answers] = run_engine(
        chain, [prompts], None, context_length=CONTEXT, speculative_algorithm="FRSPEC",
        speculative_token_map=str(chain.token_map), **TREE,
    )  # fmt: skip
    for prompt, answer in zip(prompts, answers, strict=True):
        # SGLang ends a reply two tokens before the end, with and without speculation.
        assert answer["ids"] == greedy(chain, prompt, CONTEXT - 2 - len(prompt))
