"""The chi-square test of the checks beside scipy's."""

import numpy as np
import pytest
import torch
from scipy import stats

from specdraft.check.chance import goodness_of_fit


@pytest.mark.parametrize("seed", range(4))
def test_it_is_scipys(seed):
    g = torch.Generator().manual_seed(seed)
    p = torch.rand(12, generator=g)
    outcomes = torch.multinomial(torch.rand(12, generator=g) + 3 * p, 400, replacement=True, generator=g)
    counts = np.bincount(outcomes.numpy(), minlength=12)
    expected = (p / p.sum() * 400).double().numpy()
    large = expected >= 5
    merged = [np.append(each[large], each[~large].sum()) for each in (counts, expected)]
    there = merged[1] > 0
    wanted = stats.chisquare(merged[0][there], merged[1][there] * (merged[0].sum() / merged[1].sum())).pvalue
    assert goodness_of_fit(outcomes, p) == pytest.approx(wanted, rel=1e-6, abs=1e-12)


def test_what_cannot_come_did_not():
    p = torch.tensor([0.5, 0.5, 0.0])
    assert goodness_of_fit(torch.tensor([0, 1] * 50 + [2]), p) == 0.0
    assert goodness_of_fit(torch.tensor([0] * 9), torch.tensor([1.0, 0.0])) == 1.0
