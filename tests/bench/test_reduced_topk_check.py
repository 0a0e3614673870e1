"""The draft head's check passes what is right and refuses what is slightly wrong."""

import math

import pytest
import torch

from bench.ops._reduced_topk_check import Reference, check, check_float32

ROWS, VOCAB, WIDTH, K = 4, 4096, 512, 10
IDS = torch.arange(VOCAB) * 3 + 1


@pytest.fixture(scope="module")
def problem():
    """Hidden states and head of logits with standard deviation 3, and their reference."""
    generator = torch.Generator().manual_seed(5)
    hidden = torch.randn(ROWS, WIDTH, generator=generator).bfloat16()
    head = (torch.randn(VOCAB, WIDTH, generator=generator) * 3 / WIDTH**0.5).bfloat16()
    return hidden, head, reference_of(hidden, head)


def reference_of(hidden, head):
    return Reference(
        hidden.double() @ head.double().T,
        (hidden @ head.T).float(),
        hidden.float() @ head.float().T,
        WIDTH,
        IDS,
    )


def topk_of(logits):
    """What a kernel with these logits returns: probabilities, ids, log-sum-exp, in float32."""
    lse = logits.logsumexp(1)
    scores, columns = logits.topk(K, dim=1)
    return (scores - lse[:, None]).exp().float(), IDS[columns], lse.float()


def test_float32_logits_pass_both_rules(problem):
    out = topk_of(problem[2].float32)
    assert check(out, problem[2]).ok
    assert check_float32(out, problem[2]).ok


def test_the_stock_chain_passes_its_own_rule_only(problem):
    out = topk_of(problem[2].stock)
    assert check(out[:2], problem[2]).ok
    verdict = check_float32(out, problem[2])
    assert not verdict.ok
    assert "float32" in verdict.why


@pytest.mark.parametrize("rule", [check, check_float32])
@pytest.mark.parametrize("factor", [0.9, 1.1])
def test_probabilities_off_by_a_tenth_fail(problem, rule, factor):
    probs, ids, lse = topk_of(problem[2].float32)
    assert not rule((probs * factor, ids, lse), problem[2]).ok


def test_probabilities_off_by_a_thousandth_fail(problem):
    probs, ids, lse = topk_of(problem[2].float32)
    assert not check_float32((probs * 1.001, ids, lse), problem[2]).ok


def test_a_sum_without_one_slice_fails(problem):
    """32 of 4,096 ids are missing from the sum alone, none of them among the top-k."""
    logits = problem[2].truth.clone()
    tail = logits.amax(0).argsort()[VOCAB // 2 : VOCAB // 2 + 32]
    kept = logits.clone()
    kept[:, tail] = -math.inf
    probs, ids, lse = topk_of(kept)
    assert (topk_of(logits)[1] == ids).all()
    assert not check_float32((probs, ids, lse), problem[2]).ok


def test_a_product_without_its_last_elements_fails(problem):
    """The last 2 of 512: a mask one step short."""
    hidden, head, reference = problem
    short = hidden[:, :-2].float() @ head[:, :-2].float().T
    assert not check_float32(topk_of(short), reference).ok


def test_a_sum_in_bf16_fails(problem):
    probs, ids, lse = topk_of(problem[2].float32)
    assert not check_float32((probs, ids, lse.bfloat16().float()), problem[2]).ok


@pytest.mark.parametrize("rule", [check, check_float32])
def test_wrong_ids_fail(problem, rule):
    probs, ids, lse = topk_of(problem[2].float32)
    swapped = ids.clone()
    swapped[:, [0, 9]] = ids[:, [9, 0]]
    assert not rule((probs, swapped, lse), problem[2]).ok
    unknown = ids.clone()
    unknown[0, 0] += 1
    assert "not in the map" in rule((probs, unknown, lse), problem[2]).why
    nan = probs.clone()
    nan[1, 2] = math.nan
    assert not rule((nan, ids, lse), problem[2]).ok


def test_an_eleventh_id_in_place_of_the_tenth_fails(problem):
    logits = problem[2].truth.clone()
    row = (logits.topk(11).values.diff(dim=1)[:, -1]).argmin()  # the largest gap behind the tenth
    logits[row, logits[row].topk(10).indices[-1]] = -math.inf
    probs, ids, lse = topk_of(logits)
    assert not check_float32((probs, ids, lse), problem[2]).ok


def test_errors_of_the_tail_excuse_nothing(problem):
    truth, stock = problem[2].truth, problem[2].stock.clone()
    stock[torch.arange(ROWS), truth.argmin(1)] += 2.0
    probs, ids, lse = topk_of(problem[2].float32)
    loose = Reference(truth, stock, problem[2].float32, WIDTH, IDS)
    assert not check((probs * 1.1, ids, lse), loose).ok


def test_a_lucky_zero_of_the_stock_chain_decides_nothing(problem):
    """Stock's errors at the returned ids are 0 by luck: those of its other likely ids count."""
    truth, stock = problem[2].truth, problem[2].stock.clone()
    top = truth.topk(K).indices
    stock.scatter_(1, top, truth.gather(1, top).float())
    lucky = Reference(truth, stock, problem[2].float32, WIDTH, IDS)
    half_as_far = truth + (problem[2].stock - truth) / 2
    assert check(topk_of(half_as_far)[:2], lucky).ok


@pytest.mark.parametrize("k", [2, 10, 64])
def test_the_float32_rule_is_sharper_than_stock_over_what_it_returns(k):
    """At a real width: of several values returned, stock is always further off than the bound."""
    generator = torch.Generator().manual_seed(7)
    hidden = torch.randn(8, 4096, generator=generator).bfloat16()
    head = (torch.randn(2000, 4096, generator=generator) * 3 / 64).bfloat16()
    truth = hidden.double() @ head.double().T
    log_p = truth.log_softmax(1)
    stock = (hidden @ head.T).float()
    columns = stock.topk(k, dim=1).indices
    off = stock.double().log_softmax(1).gather(1, columns) - log_p.gather(1, columns)
    stock_error = off.abs().amax(1)

    float32 = hidden.float() @ head.float().T
    reference = Reference(truth, stock, float32, 4096, torch.arange(2000))
    lse = truth.logsumexp(1)
    scores, ids = truth.topk(k, dim=1)
    right = (scores - lse[:, None]).exp().float()
    assert check_float32((right, ids, lse.float()), reference).ok
    at_least_stock = (right.double() * (1.5 * stock_error).exp()[:, None]).float()
    for row in range(8):  # one row as far off as stock times 1.5: refused
        probs = right.clone()
        probs[row] = at_least_stock[row]
        assert not check_float32((probs, ids, lse.float()), reference).ok


def test_a_row_does_not_excuse_another(problem):
    truth, float32 = problem[2].truth, problem[2].float32.clone()
    float32[0] += torch.randn(VOCAB, generator=torch.Generator().manual_seed(1)) * 0.1
    probs, ids, lse = topk_of(problem[2].float32)
    loose = Reference(truth, problem[2].stock, float32, WIDTH, IDS)
    assert check_float32((probs, ids, lse), loose).ok
    probs[1] *= 1.001
    assert not check_float32((probs, ids, lse), loose).ok
