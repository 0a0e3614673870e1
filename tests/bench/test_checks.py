import math

import pytest
import torch

from bench.checks import (
    Verdict,
    equal,
    error_bound,
    fail,
    no_worse_than_torch,
    ties_to_smaller_id,
    topk_matches,
    ulp,
)


@pytest.mark.parametrize(
    ("value", "dtype", "expected"),
    [
        (1.0, torch.bfloat16, 2**-7),
        (1.99, torch.bfloat16, 2**-7),
        (-2.0, torch.float16, 2**-9),
        (0.0, torch.float32, 2**-126 * 2**-23),
    ],
)
def test_ulp(value, dtype, expected):
    assert ulp(torch.tensor(value, dtype=torch.float64), dtype).item() == expected


def _rounded(truth):
    return truth.to(torch.bfloat16)


def test_correct_rounding_passes_and_reports_its_error():
    truth = torch.randn(4, 32, dtype=torch.float64)
    out = _rounded(truth)
    verdict = no_worse_than_torch(out, _rounded(truth), truth)
    assert verdict.ok, verdict.why
    assert verdict.error == (out.double() - truth).abs().max().item()


def test_one_value_off_by_more_than_the_bound_fails_and_is_named():
    truth = torch.ones(3, 8, dtype=torch.float64)
    out = _rounded(truth)
    out[1, 5] += 4 * 2**-7
    verdict = no_worse_than_torch(out, _rounded(truth), truth)
    assert not verdict.ok
    assert "(1, 5)" in verdict.why
    assert verdict.error == 4 * 2**-7


def test_a_row_does_not_excuse_another():
    truth = torch.tensor([[1e3, 1e3], [1.0, 1.0]], dtype=torch.float64)
    bad_torch = torch.tensor([[1010.0, 1e3], [1.0, 1.0]])
    out = torch.tensor([[1e3, 1e3], [1.01, 1.0]])
    assert not no_worse_than_torch(out, bad_torch, truth).ok


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_nan_and_stray_infinity_never_pass(value):
    truth = torch.ones(2, 4, dtype=torch.float64)
    out = truth.float()
    out[0, 0] = value
    assert not no_worse_than_torch(out, out, truth).ok


def test_nan_truth_does_not_excuse_nan():
    truth = torch.full((1, 4), math.nan, dtype=torch.float64)
    assert not no_worse_than_torch(truth.float(), truth.float(), truth).ok


def test_the_truths_own_infinities_pass():
    truth = torch.tensor([[math.inf, -math.inf, 1.0]], dtype=torch.float64)
    assert no_worse_than_torch(truth.float(), truth.float(), truth).ok
    assert not no_worse_than_torch(-truth.float(), truth.float(), truth).ok


def test_wrong_shape_and_dtype_fail():
    truth = torch.ones(2, 4, dtype=torch.float64)
    assert "shape" in no_worse_than_torch(truth[:1].float(), truth.float(), truth).why
    assert "dtype" in no_worse_than_torch(truth.half(), truth.float(), truth).why


def test_empty_results_pass():
    empty = torch.empty(0, 4)
    assert no_worse_than_torch(empty, empty, empty.double()).ok


def test_bound_is_torchs_worst_error_of_the_row_times_slack_plus_ulp():
    truth = torch.tensor([[1.0, 1.0]], dtype=torch.float64)
    bound = error_bound(torch.tensor([[1.5, 1.0]]), truth)
    assert torch.allclose(bound, torch.full((1, 2), 0.75 + 2**-23, dtype=torch.float64), rtol=1e-12)


def test_equal():
    ids = torch.tensor([1, 2, 3])
    assert equal(ids, ids).ok
    assert "1 of 3" in equal(ids, torch.tensor([1, 2, 4])).why
    assert not equal(ids, ids[:2]).ok


TRUTH = torch.tensor([[5.0, 1.0, 4.0, 4.0, 0.0]], dtype=torch.float64)


def _topk(ids, values=None, bound=1e-3):
    ids = torch.tensor([ids])
    values = TRUTH.gather(1, ids) if values is None else torch.tensor([values])
    return topk_matches(values.float(), ids, TRUTH, bound)


def test_topk_passes_in_either_order_of_a_tie():
    assert _topk([0, 2, 3]).ok
    assert _topk([0, 3, 2]).ok
    assert _topk([0, 3]).ok
    assert _topk([0, 2, 3, 1, 4]).ok


@pytest.mark.parametrize(
    ("ids", "values", "why"),
    [
        ([0, 2, 2], None, "twice"),
        ([2, 0, 3], None, "descend"),
        ([0, 2, 9], [5.0, 4.0, 4.0], "outside"),
        ([0, 2, -1], [5.0, 4.0, 4.0], "outside"),
        ([0, 2, 1], None, "belong"),
        ([0, 2, 3], [5.0, 4.0, 3.9], "true scores"),
        ([0, 2, 3], [5.0, 4.0, math.nan], "NaN"),
        ([2, 3, 1], None, "differ"),
    ],
)
def test_topk_refuses(ids, values, why):
    verdict = _topk(ids, values)
    assert not verdict.ok
    assert why in verdict.why


def test_topk_allows_a_swap_only_within_the_bound():
    assert _topk([2, 0, 3], [5.0, 5.0, 4.0], bound=1.0).ok
    assert not _topk([2, 0, 3], [4.2, 4.2, 4.0], bound=0.3).ok


def test_topk_of_an_empty_batch():
    none = torch.empty(0, 3)
    assert topk_matches(none, none.long(), torch.empty(0, 5, dtype=torch.float64), 0.1).ok


def test_ties():
    values = torch.tensor([[2.0, 2.0, 1.0]])
    assert ties_to_smaller_id(values, torch.tensor([[3, 7, 1]])).ok
    assert not ties_to_smaller_id(values, torch.tensor([[7, 3, 1]])).ok


def test_verdicts_combine():
    both = Verdict(True, 0.5) & fail("bad", 2.0)
    assert (both.ok, both.error, both.why) == (False, 2.0, "bad")
