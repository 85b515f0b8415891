"""Fits of curves whose course is known."""

import math

import numpy as np
import pytest

from specdraft.forecast.curves import FAMILIES, SHAPES, fit_curves
from specdraft.forecast.outlook import interval_of, measured_interval

TRUTHS = {
    "saturates as a power law": lambda x: 3.2 - 0.8 * x**-0.4,
    "saturates soon": lambda x: 3.0 - 1.2 * np.exp(-x / 0.3),
    "still grows": lambda x: 2.5 + 0.3 * np.log(x),
    "starts late": lambda x: 1 + 2.2 / (1 + (0.3 / x) ** 1.4),
}


def measured(truth, seed, gain=0.0, noise=0.03):
    """Twenty noisy measurements of a whole training: over x = n / n_N, with the share of the decay at each."""
    x = np.arange(1, 21) / 20
    decay = 0.95 * (1 - np.cos(np.pi * x)) / 2
    return x, truth(x) + gain * decay + noise * np.random.default_rng(seed).standard_normal(20), decay


def share_held(lengths_of=lambda lengths: lengths):
    """Of trainings whose last measurement lies in the interval that was made of their first half."""
    held, widths = [], []
    for number in range(60):
        x, lengths, decay = measured(
            [*TRUTHS.values()][number % 4], number, gain=0.5 * (number % 3) / 2
        )  # as real runs had it
        curves = fit_curves(x[:10], lengths_of(lengths[:10]), decay[:10], 6.0)
        low, high = measured_interval(curves, 1.0, decay[-1])
        held.append(low <= lengths[-1] <= high)
        widths.append(high - low)
    return np.mean(held), np.mean(widths)


def test_intervals_hold_what_they_say():
    held, width = share_held()
    assert held >= 0.85 and width < 0.5


def test_measurements_that_do_not_rise_forecast_nothing():
    held, _ = share_held(lambda lengths: np.full_like(lengths, lengths[-1]))
    assert held < 0.8  # so the test above can fail


@pytest.mark.parametrize("name", TRUTHS)
def test_the_fit_follows_what_it_saw(name):
    x, lengths, decay = measured(TRUTHS[name], 0, noise=0.01)
    curves = fit_curves(x, lengths, decay, 6.0)
    for place in (0.25, 0.5, 1.0):
        index = round(20 * place) - 1
        assert np.median(curves.at(place, decay[index])) == pytest.approx(lengths[index], abs=0.06)


def test_the_interval_grows_with_the_distance_and_ends_at_the_ceiling():
    x, lengths, decay = measured(TRUTHS["still grows"], 0)
    curves = fit_curves(x, lengths, decay, 3.0)
    low, high = zip(*(interval_of(curves.at(factor)) for factor in (1, 10, 1000)), strict=True)
    widths = np.subtract(high, low)
    assert widths[0] < widths[1] and max(high) <= 3.0
    free = fit_curves(x, lengths, decay, 6.0)
    assert np.diff(interval_of(free.at(1000)))[0] > 2 * widths[2]


def test_a_course_that_is_flat_is_mostly_a_constant():
    x = np.arange(1, 21) / 20
    flat = 2.0 + 0.02 * np.random.default_rng(1).standard_normal(20)
    curves = fit_curves(x, flat, np.zeros(20), 6.0)
    shares = curves.families()
    assert set(shares) == set(FAMILIES) and sum(shares.values()) == pytest.approx(1)
    assert max(shares, key=shares.get) == "constant"
    assert interval_of(curves.at(2))[1] < 2.1
    rising = fit_curves(x, TRUTHS["still grows"](x), np.zeros(20), 6.0)
    assert rising.families()["constant"] < 0.01


def test_falling_acceptance_is_no_forecast_of_a_fall():
    x = np.arange(1, 11) / 10
    curves = fit_curves(x, 3.0 - x, np.zeros(10), 6.0)
    assert np.all(curves.at(10) >= curves.at(1) - 1e-9)


def test_neighbors_that_err_alike_tell_less():
    x, random = np.arange(1, 21) / 20, np.random.default_rng(0)
    wave, scattered = 0.05 * np.sin(8 * x), 0.05 * np.sin(8 * x)[random.permutation(20)]
    truth, decay = TRUTHS["saturates as a power law"](x), np.zeros(20)
    alike, independent = (fit_curves(x, truth + error, decay, 6.0) for error in (wave, scattered))
    assert np.std(alike.at(1.0)) > np.std(independent.at(1.0))


def test_two_points_of_known_noise_leave_the_shape_open():
    curves = fit_curves(np.array([500.0, 1000.0]), np.array([2.0, 2.3]), np.zeros(2), 6.0, noise=0.02, known=True)
    gains = curves.at(2000) - curves.at(1000)
    low, high = interval_of(gains)
    assert low < 0.15 < 0.3 <= high < 0.5 and np.all(gains >= 0)
    assert len(curves.level) == len(curves.noise) and math.isfinite(curves.level.sum())
    assert {shape.family for shape in SHAPES} == set(FAMILIES)
