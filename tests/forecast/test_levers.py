"""Runs that differ in one thing, and in more."""

import math

import pytest

from specdraft.forecast.levers import compare, data_curve, differences, lever, seed_spread


def test_levers_by_the_longest_prefix():
    assert lever("model.drafter.num_layers") == lever("model.draft_vocab_size") == "head"
    assert lever("model.optimizer.learning_rate") == "optimizer" and lever("data.batch_size") == "steps"
    assert lever("data.limit") == "data" and lever("data.num_proc") is None
    assert lever("hydra.run.dir") is None and lever("seed") is None


def test_only_runs_that_differ_in_one_lever_are_compared(make):
    small, large = make("small", 3.0, data__limit=500), make("large", 3.3)
    wide = make("wide", 3.6, cost=(0.1, 1.1), model__drafter__num_layers=2)
    both = make("both", 3.0, data__limit=500, seed=1, model__drafter__num_layers=2)
    assert differences(small, both) == {"head": ["model.drafter.num_layers"]}
    assert set(differences(large, both)) == {"data", "head"}
    found = {(each.less, each.more): each for each in compare([large, small, wide])}
    assert set(found) == {("small", "large"), ("large", "wide")}
    data, head = found["small", "large"], found["large", "wide"]
    assert data.lever == "data" and data.change == "data.limit from 500 to 1000"
    assert data.gain == pytest.approx(0.3, abs=0.02) and data.interval[0] < 0.3 < data.interval[1]
    assert head.lever == "head" and head.gain == pytest.approx(0.3, abs=0.02)
    assert head.speedup_gain == pytest.approx(3.6 / 1.6 - 3.3 / 1.35, abs=0.02)  # accepted more, and slower


def test_runs_measured_otherwise_are_not_compared(make):
    assert not list(compare([make("a", 3.0), make("b", 3.3, decoding__num_draft_tokens=3)]))


def test_seeds_widen_every_comparison(make):
    runs = [make("small", 3.0, data__limit=500), make("large", 3.3)]
    assert seed_spread(runs) is None
    (alone,) = compare(runs)
    again = [*runs, make("again", 3.5, seed=1)]
    assert seed_spread(again) == pytest.approx(0.2 / math.sqrt(2), abs=0.02)
    apart = next(each for each in compare(again) if (each.less, each.more) == ("small", "large"))
    assert apart.interval[1] - apart.interval[0] > 3 * (alone.interval[1] - alone.interval[0])


def test_a_curve_over_the_amounts_of_data(make):
    assert data_curve([make("one", 3.0)]) is None
    runs = [make(f"data-{size}", level, data__limit=size) for size, level in ((250, 2.6), (500, 2.8), (1000, 3.0))]
    curve = data_curve([make("other", 4.0, model__drafter__num_layers=2), *runs])
    assert curve.sizes == [250, 500, 1000] and curve.runs == ["data-250", "data-500", "data-1000"]
    assert curve.interval[0] < 0.2 < curve.interval[1] and 0.1 < curve.doubling < 0.3
