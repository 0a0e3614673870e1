"""Sampled replies of the real engine: distributed as the target's own, and repeatable by seed.

Known exactly: the target is small enough to compute the probability of every reply of three
tokens. All kinds of requests share their batches. Engine and requests have fixed seeds, so a run
gives one outcome; a right engine fails with one seed in 50 (ten replies' kinds at 0.002 each).
"""

import json
import math

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from frspec_kernels.sampling_reference import target_distribution
from tests.engine.chain_model import make_chain_model
from tests.engine.conftest import ENGINE, engine_process
from tests.engine.run_engine import MARK

pytestmark = [pytest.mark.engine, pytest.mark.slow]

VOCAB, LENGTH = 64, 3
FALSE_ALARM = 0.002
# What a kind of request asks for, and the target's distribution that follows.
KINDS = {
    "T 1.0": ({"temperature": 1.0}, {}),
    "T 0.7": ({"temperature": 0.7}, {"temperature": 0.7}),
    "top-p": ({"temperature": 1.0, "top_p": 0.9}, {"top_p": 0.9}),
    "top-k, min-p": ({"temperature": 1.3, "top_k": 9, "min_p": 0.1}, {"temperature": 1.3}),
    "bias": ({"temperature": 1.0, "logit_bias": {"7": 2.0, "30": -3.0}}, {}),
}
KINDS["top-k, min-p"][1].update(top_k=9, min_p=0.1)
EACH = 300
COMPANY = 16


@pytest.fixture(scope="module")
def chain(tmp_path_factory):
    """A chain whose next token is likely but not certain."""
    made = make_chain_model(
        tmp_path_factory.mktemp("chain"),
        vocab=VOCAB, hot_share=0.6, context=0.5, noise=0.05, seed=3,
    )  # fmt: skip
    file = made.target / "model.safetensors"
    tensors = load_file(file)
    tensors["lm_head.weight"] /= 18.0
    save_file(tensors, file, metadata={"format": "pt"})
    return made


@pytest.fixture(scope="module", params=["tree", "chain", "drawn tree", "drawn chain"])
def replies(request, chain, tmp_path_factory):
    """One engine: the mixed batch, then seeded requests in other company and alone."""
    top_k, nodes = {"tree": (3, 7), "chain": (1, 3)}[request.param.removeprefix("drawn ")]
    options = {
        "model_path": str(chain.target), "max_running_requests": 48, "max_total_tokens": 8192,
        "random_seed": 11, "speculative_algorithm": "FRSPEC",
        "speculative_draft_model_path": str(chain.draft),
        "speculative_token_map": str(chain.token_map), "speculative_num_steps": 2,
        "speculative_eagle_topk": top_k, "speculative_num_draft_tokens": nodes,
        "speculative_use_rejection_sampling": request.param.startswith("drawn"),
    }  # fmt: skip
    common = {"max_new_tokens": LENGTH, "ignore_eos": True}
    mixed = [asked | common for asked, _ in KINDS.values() for _ in range(EACH)]
    mixed[::50] = [{"temperature": 0} | common for _ in mixed[::50]]
    samplings = [mixed, *seeded_in_all_ways().values()]
    batches = [[prompt(chain)] * len(mixed)]
    batches += [[prompt(chain, seed_of(one)) for one in batch] for batch in samplings[1:]]
    job = {"engine": {**ENGINE, **options}, "batches": batches, "samplings": samplings}
    done = engine_process(job, tmp_path_factory.mktemp("engine"))
    lines = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
    assert lines, done.stdout[-3000:] + done.stderr[-5000:]
    return json.loads(lines[-1].removeprefix(MARK))["answers"]


def prompt(chain, place=0):
    return [5, 6, int(chain.order[20 + place])]


def seed_of(sampling):
    return sampling.get("sampling_seed", 0)


def seeded_in_all_ways():
    """Batches of 16 seeded requests: in order, again, reversed, among greedy ones, and alone."""
    common = {"ignore_eos": True, "max_new_tokens": 12}
    company = [{"temperature": 1.0, "sampling_seed": 1 + i} | common for i in range(COMPANY)]
    greedy = {"temperature": 0.0} | common
    return {
        "company": company, "again": company, "reversed": company[::-1],
        "among greedy ones": [x for one in company for x in (greedy, one)],
    } | {f"alone {i}": [one] for i, one in enumerate(company)}  # fmt: skip


@pytest.fixture(scope="module")
def logits(chain):
    """The target's logits after the prompt and every context of up to two tokens."""
    model = AutoModelForCausalLM.from_pretrained(chain.target, dtype=torch.float32)
    first = torch.arange(VOCAB)[:, None]
    pairs = torch.cartesian_prod(torch.arange(VOCAB), torch.arange(VOCAB))
    found = []
    with torch.inference_mode():
        for context in (torch.empty(1, 0, dtype=torch.int64), first, pairs):
            rows = torch.tensor([prompt(chain)]).expand(len(context), -1)
            found.append(model(torch.cat([rows, context], 1)).logits[:, -1].double())
    return found


def joint(logits, asked):
    """[V, V, V] probability of every reply."""

    def rows(x):
        return torch.stack([target_distribution(row, **asked) for row in x])

    p1, p2, p3 = (rows(x) for x in logits)
    return p1[0][:, None, None] * p2[:, :, None] * p3.view(VOCAB, VOCAB, VOCAB)


def chi_square_p_value(counts, expected):
    """Upper tail of Pearson's statistic, by Wilson and Hilferty's cube root.

    Cells are pooled in the order of their probability until six are expected in each.
    """
    assert counts[expected == 0].sum() == 0, "a token of probability 0 came out"
    order = expected.flatten().argsort(descending=True)
    pool = (expected.flatten()[order].cumsum(0) / 6).long()
    observed, wanted = torch.zeros(2, int(pool[-1]) + 1, dtype=expected.dtype)
    observed.index_add_(0, pool, counts.flatten()[order])
    wanted.index_add_(0, pool, expected.flatten()[order])
    used = wanted > 0
    statistic = float(((observed - wanted)[used] ** 2 / wanted[used]).sum())
    degrees = int(used.sum()) - 1
    spread = 2 / (9 * degrees)
    z = ((statistic / degrees) ** (1 / 3) - (1 - spread)) / math.sqrt(spread)
    return math.erfc(z / math.sqrt(2)) / 2


@pytest.mark.parametrize("kind", KINDS)
def test_replies_are_distributed_as_the_targets(replies, logits, kind):
    place = list(KINDS).index(kind)
    own = range(place * EACH, (place + 1) * EACH)
    ids = torch.tensor([replies[0][i]["ids"] for i in own if i % 50])
    asked = KINDS[kind][1]
    bias = torch.zeros(VOCAB, dtype=torch.float64)
    for token, value in KINDS[kind][0].get("logit_bias", {}).items():
        bias[int(token)] = value
    p = joint([x + bias for x in logits], asked)
    counts = torch.zeros_like(p)
    counts.index_put_(tuple(ids.T), torch.ones(len(ids), dtype=p.dtype), accumulate=True)
    for axes in ((1, 2), (0, 2), (0, 1), 2, 0):
        expected = p.sum(axes) * len(ids)
        assert chi_square_p_value(counts.sum(axes), expected) > FALSE_ALARM / 5


def test_greedy_requests_among_sampled_ones_are_greedy(replies, logits):
    first = int(logits[0].argmax())
    second = int(logits[1][first].argmax())
    third = int(logits[2][first * VOCAB + second].argmax())
    assert {tuple(answer["ids"]) for answer in replies[0][::50]} == {(first, second, third)}


def test_a_seed_repeats_alone_and_in_any_company(replies):
    asked = seeded_in_all_ways()
    found = {}
    for (way, samplings), answers in zip(asked.items(), replies[1:], strict=True):
        for sampling, answer in zip(samplings, answers, strict=True):
            if seed := seed_of(sampling):
                found[way, seed] = answer["ids"]
    first = [found["company", 1 + i] for i in range(COMPANY)]
    for way in ("again", "reversed", "among greedy ones"):
        assert [found[way, 1 + i] for i in range(COMPANY)] == first, way
    assert [found[f"alone {i}", 1 + i] for i in range(COMPANY)] == first
    assert len(set(map(tuple, first))) >= 14


def test_drafts_are_accepted_and_rejected(replies):
    cycles = sum(answer["cycles"] for answer in replies[1])
    assert 1.05 < 12 * 16 / cycles < 2.8
