"""What is read of a run's directory."""

import json
import math

import numpy as np
import pytest

from specdraft.errors import UserError
from specdraft.forecast.runs import read_run
from tests.forecast.written import EVERY, STEPS, TOKENS, write_run


def test_measurements_over_tokens_behind_the_warm_up(tmp_path):
    run = read_run(write_run(tmp_path / "run", lambda n: 2.0 + n / 1e6, model__optimizer__warmup_steps=0.1))
    assert run.name == "run" and run.steps[0] == 2 * EVERY and run.steps[-1] == STEPS
    assert np.allclose(run.tokens, run.steps * TOKENS) and np.allclose(run.lengths, 2.0 + run.tokens / 1e6)
    assert run.round_cost == pytest.approx(1.1 + 5 * 0.05) and np.all(run.errors == 0.05) and run.num_draft_tokens == 5
    assert not run.decay.any() and math.isnan(run.data_tokens)
    assert run.settings["data.limit"] == "1000"


def test_the_decay_of_the_learning_rate(tmp_path):
    run = read_run(write_run(tmp_path / "run", lambda n: 2.0, model__optimizer__schedule="cosine"))
    assert np.all(np.diff(run.decay) > 0) and run.decay[-1] == pytest.approx(run.last_decay, abs=0.01)
    half = run.first(0.5)
    assert half.steps[-1] == STEPS / 2 and len(half.lengths) == len(half.decay) == len(half.tokens) == 10
    assert half.last_decay == run.last_decay


def test_the_runs_own_evaluation_says_what_a_round_costs(tmp_path):
    folder = write_run(tmp_path / "run", lambda n: 2.0)
    (folder / "evaluation.json").write_text(json.dumps({"results": [{"acceptance_length": 3.0, "speedup": 2.0}]}))
    assert read_run(folder).round_cost == 1.5


def test_without_counts_of_tokens_a_step_reads_whole_sequences(tmp_path):
    folder = write_run(tmp_path / "run", lambda n: 2.0)
    lines = (folder / "metrics.csv").read_text().replace("train/tokens_per_step", "other")
    (folder / "metrics.csv").write_text(lines.replace("acceptance_length_error", "another"))
    run = read_run(folder)
    assert run.tokens[0] == EVERY * 512 and np.isnan(run.errors).all()


def test_bad_input(tmp_path):
    with pytest.raises(UserError, match="is no run that a forecast can read"):
        read_run(tmp_path)
    with pytest.raises(UserError, match=r"5 live measurements.*at least 6; set live.every_n_steps=5"):
        read_run(write_run(tmp_path / "short", lambda n: 2.0, trainer__max_steps=100))
