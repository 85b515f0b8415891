"""Bootstrap intervals: closed forms, coverage, and the undefined cases."""

import pytest
import torch

from specdraft.evaluation.bootstrap import bootstrap_interval


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


def test_coverage():
    # 95 % intervals of 100 samples of 40 values: all but a few contain the true mean, and some miss it.
    generator = torch.Generator().manual_seed(1)
    covered = 0
    for _ in range(100):
        values = torch.rand(40, generator=generator, dtype=torch.float64)
        low, high = bootstrap_interval(columns(values), mean, resamples=400)
        covered += low <= 0.5 <= high
    assert 87 <= covered <= 99


def test_ratio_of_sums_weights_prompts_by_their_size():
    table = torch.tensor([[10.0, 10.0], [0.0, 1.0]])  # a long prompt with ratio 1, a short one with ratio 0
    low, high = bootstrap_interval(table, mean)
    assert (low, high) == (0.0, 1.0)
    assert bootstrap_interval(table, mean, confidence=0.3, resamples=4000)[0] == pytest.approx(10 / 11)


def test_seeded():
    values = columns(torch.arange(9.0))
    assert bootstrap_interval(values, mean, seed=3) == bootstrap_interval(values, mean, seed=3)


def test_undefined():
    assert bootstrap_interval(columns(torch.ones(1)), mean) is None
    assert bootstrap_interval(torch.zeros(4, 2), mean) is None  # 0 / 0 in every resample
