"""A Gemma 3 target: what FRSPEC drafts and what the engine answers, in windows and out of them."""

import pytest
import torch

from tests.engine.conftest import greedy
from tests.engine.gemma_chain import WINDOW, make_gemma_chain

pytestmark = [pytest.mark.engine, pytest.mark.slow]

TOKENS, STEPS = 40, 3


def frspec(chain):
    return {
        "speculative_algorithm": "FRSPEC",
        "speculative_token_map": str(chain.token_map),
        "speculative_num_steps": STEPS,
        "speculative_eagle_topk": 3,
        "speculative_num_draft_tokens": 10,
    }


def test_known_tokens_and_known_cycles(run_engine, tmp_path):
    """The draft is right wherever the map lets it: factor and norms are where they belong."""
    chain = make_gemma_chain(tmp_path, seed=3)
    prompts = [chain.order[place : place + 4].tolist() for place in (0, 60, 150, 300)]
    [answers] = run_engine(chain, [prompts], TOKENS, **frspec(chain))
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer["ids"] == chain.continuation(prompt[-1], TOKENS)
        assert answer["cycles"] == len(chain.cycle_lengths(prompt[-1], TOKENS, STEPS))


def test_output_equals_transformers_past_the_window(run_engine, tmp_path):
    chain = make_gemma_chain(tmp_path, context=0.62, noise=0.04, seed=5)
    generator = torch.Generator().manual_seed(6)
    lengths = (2, WINDOW, 5 * WINDOW, 60)
    prompts = [torch.randint(3, 512, (n,), generator=generator).tolist() for n in lengths]
    # The last batch finds its prompt in the prefix cache.
    batches = [prompts, [[*prompts[3], 9]]]
    expected = [[greedy(chain, prompt, TOKENS) for prompt in batch] for batch in batches]
    drafted = run_engine(chain, batches, TOKENS, **frspec(chain))
    assert [[a["ids"] for a in batch] for batch in drafted] == expected
    cycles = [a["cycles"] for batch in drafted for a in batch]
    assert 1.2 < TOKENS * len(cycles) / sum(cycles) < 3, cycles
    outputs = [ids for batch in expected for ids in batch]
    assert all(len(set(ids)) > 10 for ids in outputs)
    # Attention led away from the chain.
    places = torch.argsort(chain.order)
    steps = torch.tensor(outputs).apply_(lambda token: int(places[token])).diff()
    assert int((steps % len(chain.order) != 1).sum()) > 20
