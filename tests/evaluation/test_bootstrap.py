"""Bootstrap intervals: closed forms, coverage, and the undefined cases."""

import pytest
import torch
from scipy import stats

from benchmarks.coverage import PROFILES, coverage
from specdraft.evaluation.bootstrap import bootstrap_interval, student_quantile


def mean(sums):
    return sums[:, 0] / sums[:, 1]


def columns(values):
    return torch.stack([values, torch.ones_like(values)], dim=1)


def test_equal_prompts_have_a_point_interval():
    low, high = bootstrap_interval(columns(torch.full((10,), 3.0)), mean)
    assert (low, high) == (pytest.approx(3.0), pytest.approx(3.0))


def test_width_of_a_mean_is_that_of_the_normal_theory():
    values = torch.randn(200, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    low, high = bootstrap_interval(columns(values), mean, resamples=4000)
    standard_error = values.std().item() / 200**0.5
    assert low < values.mean().item() < high
    assert high - low == pytest.approx(2 * 1.96 * standard_error, rel=0.08)


@pytest.mark.parametrize(("prompts", "samples"), [(8, 800), (16, 500)])
def test_few_prompts_are_covered(prompts, samples):
    """Percentiles of the resampled values hold the truth in 87 % and 91 % of the cases of this simulation."""
    found = coverage(PROFILES["ordinary"], prompts, samples, resamples=250, seed=1)
    # Three standard errors of the simulation below the 94 % that benchmarks/coverage.py shows with more samples.
    assert 0.94 - 3 * (0.94 * 0.06 / samples) ** 0.5 < found["bootstrap-t"] < 0.985
    assert found["percentile"] < found["bootstrap-t"] - 0.02


@pytest.mark.parametrize("freedom", [1, 2, 7, 39, 500])
@pytest.mark.parametrize("probability", [0.6, 0.975, 0.995])
def test_students_quantiles(probability, freedom):
    assert student_quantile(probability, freedom) == pytest.approx(stats.t.ppf(probability, freedom), rel=1e-3)


def test_ratio_of_sums_weights_prompts_by_their_size():
    table = torch.tensor([[10.0, 10.0], [0.0, 1.0]])  # a long prompt with ratio 1, a short one with ratio 0
    assert bootstrap_interval(table, mean, bounds=(0.0, 1.0)) == (0.0, 1.0)
    low, high = bootstrap_interval(table, mean)
    assert (low + high) / 2 == pytest.approx(10 / 11)


@pytest.mark.parametrize("seed", range(5))
def test_three_prompts_whose_shares_round(seed):
    """A ninth of the resamples draw one prompt three times; its spread is zero, or what rounding makes of it."""
    table = torch.rand((3, 4), generator=torch.Generator().manual_seed(seed), dtype=torch.float64) + 0.7

    def speedup(sums):
        return (sums[:, 0] / sums[:, 1]) / (sums[:, 2] / sums[:, 3])

    low, high = bootstrap_interval(table, speedup)
    assert -100 < low < high < 100


def test_seeded():
    values = columns(torch.arange(9.0))
    assert bootstrap_interval(values, mean, seed=3) == bootstrap_interval(values, mean, seed=3)


def test_undefined():
    assert bootstrap_interval(columns(torch.ones(1)), mean) is None
    assert bootstrap_interval(torch.zeros(4, 2), mean) is None  # 0 / 0 in every resample
