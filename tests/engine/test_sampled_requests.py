"""Drawn drafts under grammars, penalties and biases: the replies' exact probabilities.

One engine with ``--speculative-use-rejection-sampling`` on a tree. The kinds of requests share one
batch, greedy ones among them. Seeds are fixed, so a run gives one outcome; a right engine fails
with one seed in 500.
"""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.engine.byte_tokenizer import write_tokenizer
from tests.engine.chain_model import make_chain_model
from tests.engine.conftest import ENGINE, engine_process
from tests.engine.run_engine import MARK
from tests.engine.test_sampling import chi_square_p_value

pytestmark = [pytest.mark.engine, pytest.mark.slow]

VOCAB, EACH = 512, 300
FALSE_ALARM = 0.001
PROMPT = [5, 6, 77]
DIGITS, LIKED, PENALTY = "0123", 300, 3.0
BIAS = {str(LIKED): 7.5}
SAMPLED = {"temperature": 1.0}
KINDS = {
    "regex": {"regex": f"[{DIGITS}][{DIGITS}]", "max_new_tokens": 8},
    "penalty": {
        "logit_bias": BIAS, "frequency_penalty": PENALTY / 2, "presence_penalty": PENALTY / 2,
        "max_new_tokens": 2, "ignore_eos": True,
    },
    "bias": {"logit_bias": BIAS, "max_new_tokens": 2, "ignore_eos": True},
}  # fmt: skip


@pytest.fixture(scope="module")
def chain(tmp_path_factory):
    """A chain whose next token is likely but not certain, and a tokenizer for grammars."""
    made = make_chain_model(
        tmp_path_factory.mktemp("chain"),
        vocab=VOCAB,
        hot_share=0.7,
        context=0.5,
        noise=0.06,
        seed=9,
    )
    file = made.target / "model.safetensors"
    tensors = load_file(file)
    tensors["lm_head.weight"] /= 18.0
    save_file(tensors, file, metadata={"format": "pt"})
    write_tokenizer(made.target, VOCAB)
    return made


@pytest.fixture(scope="module")
def replies(chain, tmp_path_factory):
    """The mixed batch, by kind; then seeded ones in a batch of 16, reversed, and alone."""
    engine = ENGINE | {
        "model_path": str(chain.target), "max_running_requests": 48, "max_total_tokens": 8192,
        "random_seed": 5, "speculative_algorithm": "FRSPEC", "skip_tokenizer_init": False,
        "speculative_draft_model_path": str(chain.draft), "grammar_backend": "xgrammar",
        "speculative_token_map": str(chain.token_map), "speculative_num_steps": 2,
        "speculative_eagle_topk": 3, "speculative_num_draft_tokens": 7,
        "speculative_use_rejection_sampling": True,
    }  # fmt: skip
    mixed = [SAMPLED | asked for _ in range(EACH) for asked in KINDS.values()]
    mixed += [{"temperature": 0} | asked for asked in KINDS.values()]
    seeded = [SAMPLED | asked | {"max_new_tokens": 8} for asked in KINDS.values()] * 6
    seeded = [asked | {"sampling_seed": 40 + i} for i, asked in enumerate(seeded[:16])]
    samplings = [mixed, seeded, seeded[::-1], *([one] for one in seeded[2:6])]
    job = {"engine": engine, "samplings": samplings}
    job["batches"] = [[PROMPT] * len(batch) for batch in samplings]
    done = engine_process(job, tmp_path_factory.mktemp("engine"))
    lines = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
    assert lines, done.stdout[-3000:] + done.stderr[-5000:]
    return [
        [answer["ids"] for answer in batch]
        for batch in json.loads(lines[-1].removeprefix(MARK))["answers"]
    ]


@pytest.fixture(scope="module")
def logits(chain):
    """The target's logits after the prompt [V], and after each first token [V, V]."""
    model = AutoModelForCausalLM.from_pretrained(chain.target, dtype=torch.float32)
    prompt = torch.tensor([PROMPT])
    contexts = torch.cat([prompt.expand(VOCAB, -1), torch.arange(VOCAB)[:, None]], 1)
    with torch.inference_mode():
        return [model(rows).logits[:, -1].double() for rows in (prompt, contexts)]


@pytest.fixture(scope="module")
def digits(chain):
    """The tokens of the digits that the grammar allows."""
    tokenizer = write_tokenizer(chain.target, VOCAB)
    return [tokenizer.convert_tokens_to_ids(digit) for digit in DIGITS]


def expected(kind, logits, digits):
    """[V, V] probability of the first two tokens."""
    first, second = logits[0][0].clone(), logits[1].clone()
    if kind == "regex":
        allowed = torch.full((VOCAB,), -torch.inf, dtype=torch.float64)
        allowed[digits] = 0
        first, second = first + allowed, second + allowed
    else:
        first[LIKED] += BIAS[str(LIKED)]
        second[:, LIKED] += BIAS[str(LIKED)]
    if kind == "penalty":
        second.diagonal().sub_(PENALTY)
    return first.softmax(0)[:, None] * second.softmax(1)


def counted(replies, kind):
    place = list(KINDS).index(kind)
    pairs = torch.tensor([ids[:2] for ids in replies[0][place : EACH * len(KINDS) : len(KINDS)]])
    counts = torch.zeros(VOCAB, VOCAB, dtype=torch.float64)
    return counts.index_put_(
        tuple(pairs.T), torch.ones(len(pairs), dtype=torch.float64), accumulate=True
    )


@pytest.mark.parametrize("kind", KINDS)
def test_replies_are_distributed_as_the_targets(replies, logits, digits, kind):
    counts, p = counted(replies, kind), expected(kind, logits, digits)
    for axis in (None, 0, 1):
        cut = (counts, p) if axis is None else (counts.sum(axis), p.sum(axis))
        assert chi_square_p_value(cut[0], cut[1] * EACH) > FALSE_ALARM / 3


def test_a_penalty_left_out_would_be_noticed(replies, logits, digits):
    counts = counted(replies, "penalty")
    assert chi_square_p_value(counts, expected("bias", logits, digits) * EACH) < 1e-6


def test_grammars_end_the_replies(replies, digits):
    for ids in replies[0][: EACH * len(KINDS) : len(KINDS)]:
        assert set(ids[:2]) <= set(digits)
        assert ids[2:] == [1]  # the end of text, all that the grammar leaves


def test_greedy_requests_among_them_are_greedy(replies, logits, digits):
    for kind, ids in zip(KINDS, replies[0][EACH * len(KINDS) :], strict=True):
        p = expected(kind, logits, digits)
        first = int(p.sum(1).argmax())
        assert ids[:2] == [first, int(p[first].argmax())]


def test_a_seed_repeats_alone_and_in_other_company(replies):
    _, company, turned, *alone = replies
    assert turned[::-1] == company
    assert [ids for [ids] in alone] == company[2:6]
    assert len({tuple(ids) for ids in company}) > 10
