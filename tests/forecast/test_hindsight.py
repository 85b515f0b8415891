"""A run's own second half says what a forecast from its first was worth."""

import pytest

from specdraft.forecast.hindsight import look_back
from specdraft.forecast.runs import read_run
from tests.forecast.written import EVERY, STEPS, TOKENS, write_run

HALF = STEPS // 2 * TOKENS


def curve(tokens: float) -> float:
    return 3.0 - 0.5 * (tokens / 2e5) ** -0.4


def test_a_run_that_goes_on_as_it_began_was_foreseen(tmp_path):
    seen = look_back(read_run(write_run(tmp_path / "run", curve)))
    assert seen.run == "run" and seen.tokens == HALF and seen.measured == pytest.approx(curve(2 * HALF))
    assert seen.interval[0] < seen.measured < seen.interval[1] and seen.expected == pytest.approx(
        seen.measured, abs=0.1
    )
    assert seen.held == seen.hidden == STEPS // 2 // EVERY


@pytest.mark.parametrize("leap", [-0.5, 0.5])
def test_one_that_turns_was_not(tmp_path, leap):
    seen = look_back(read_run(write_run(tmp_path / "run", lambda n: curve(n) + leap * (n > HALF))))
    assert seen.held == 0 and not seen.interval[0] < seen.measured < seen.interval[1]


def test_a_half_with_too_few_measurements_foresees_nothing(tmp_path):
    assert look_back(read_run(write_run(tmp_path / "run", curve, trainer__max_steps=10 * EVERY))) is None
