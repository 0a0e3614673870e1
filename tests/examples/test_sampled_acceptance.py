"""The chances in the example's table are those of the rule."""

import pytest
import torch

from examples.smollm2_135m.sampled_acceptance import chances
from frspec_kernels.sampling_reference import greedy_proposal_acceptance


@pytest.mark.parametrize("children", [1, 2, 4])
@pytest.mark.parametrize("hot", [6, 12])
def test_chances_follow_the_rule(children, hot):
    g = torch.Generator().manual_seed(children + hot)
    p = torch.randn(5, 12, generator=g, dtype=torch.float64).mul(2).softmax(-1)
    q = torch.randn(5, hot, generator=g, dtype=torch.float64).softmax(-1)
    token_ids = torch.randperm(12, generator=g)[:hot].sort().values
    found = chances(p, q, token_ids, children)
    for row in range(5):
        dense = torch.zeros(12, dtype=torch.float64)
        dense[token_ids] = q[row]
        drawn = greedy_proposal_acceptance(p[row], dense, children - 1)
        assert float(found.drawn[row]) == pytest.approx(drawn, abs=1e-12)
        best = dense.topk(children).indices
        assert float(found.fixed[row]) == pytest.approx(float(p[row, best].sum()), abs=1e-12)


def test_a_perfect_draft_is_always_accepted():
    p = torch.randn(3, 9, generator=torch.Generator().manual_seed(1)).softmax(-1)
    found = chances(p, p, torch.arange(9), 3)
    torch.testing.assert_close(found.drawn, torch.ones(3))
    assert bool((found.fixed < 1).all())
