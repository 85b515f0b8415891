"""What is expected of more tokens, and the forecasts of the first halves of real runs."""

from pathlib import Path

import numpy as np
import pytest

from specdraft.forecast.outlook import fit_run, make_outlook, measured_interval
from specdraft.forecast.runs import read_run
from tests.forecast.written import write_run

RUNS = Path(__file__).parent / "runs"  # see its README.md
FIRST = ("eagle3-0", "eagle3-1", "medusa-0", "medusa-1", "mtp-0")
SECOND = ("eagle3-2", "eagle3-3", "medusa-2", "smollm2-eagle3-0", "smollm2-medusa-0")
THIRD = ("eagle3-4", "medusa-3", "mtp-1", "smollm2-eagle3-1", "smollm2-medusa-1")  # made when all was settled


def inside(run, forecast):
    """Which measurements of the second half the 90 % intervals of ``forecast(first half)`` hold."""
    interval = forecast(half := run.first(0.5))
    hidden = range(len(half.steps), len(run.steps))
    return [low <= run.lengths[i] <= high for i in hidden for low, high in [interval(run.tokens[i], run.decay[i])]]


def holds(run, forecast):
    """Whether the 90 % intervals of ``forecast(first half)`` hold the second half: its last measurement, and all
    of its measurements but one."""
    held = inside(run, forecast)
    return held[-1] and sum(held) >= len(held) - 1


def curves(half):
    fitted = fit_run(half)
    return lambda tokens, decay: measured_interval(fitted, tokens, decay)


def nothing_more(half):
    """No further rise: the mean of the last measurements and their noise."""
    seen = half.lengths[-4:]
    return lambda *_: (seen.mean() - 1.645 * seen.std(ddof=1), seen.mean() + 1.645 * seen.std(ddof=1))


def straight(half):
    """A straight line through the measurements, as eyes draw it."""
    slope, offset = np.polyfit(half.tokens, half.lengths, 1)
    noise = 1.645 * np.std(half.lengths - slope * half.tokens - offset, ddof=2)
    return lambda tokens, _: (slope * tokens + offset - noise, slope * tokens + offset + noise)


def test_first_halves_of_real_runs_foresee_the_second():
    runs = [read_run(RUNS / name) for name in FIRST]
    assert len({run.settings["model.drafter._target_"] for run in runs}) >= 2
    assert sum(holds(run, curves) for run in runs) >= 4
    for run in runs:
        half = run.first(0.5)
        low, high = curves(half)(run.tokens[-1], run.decay[-1])
        assert high - low < run.lengths[-1] - 1  # an interval that holds everything is none
    for wrong in (nothing_more, straight):
        assert sum(holds(run, wrong) for run in runs) < 4, wrong.__name__


def counts(names, forecast):
    """Of these runs: the second halves that ``forecast(first half)`` held, how many of their measurements it held, and
    how many these are."""
    runs = [read_run(RUNS / name) for name in names]
    found = [inside(run, forecast) for run in runs]
    return sum(holds(run, forecast) for run in runs), sum(map(sum, found)), sum(map(len, found))


def test_so_they_do_of_runs_made_when_all_was_settled():
    runs, held, hidden = counts(THIRD, curves)
    assert runs == 5 and hidden == 50 and held >= 0.9 * hidden
    for wrong in (nothing_more, straight):
        runs, held, _ = counts(THIRD, wrong)
        assert runs < 4 and held < 0.8 * hidden, wrong.__name__


def test_what_a_falling_learning_rate_may_still_bring_is_what_was_missed():
    runs, held, hidden = counts(SECOND, curves)
    assert runs >= 4 and held >= 0.9 * hidden


def test_more_tokens_are_worth_less_each_time(tmp_path):
    run = read_run(write_run(tmp_path / "run", lambda n: 3.0 - 0.5 * (n / 2e5) ** -0.4))
    outlook = make_outlook(run, [1, 2, 10, 100], 0.01)
    lengths = [each.acceptance_length for each in outlook.expectations]
    assert lengths[0] == pytest.approx(2.5, abs=0.05) and lengths == sorted(lengths) and lengths[-1] < 3.3
    assert lengths[1] == pytest.approx(3 - 0.5 * 2**-0.4, abs=0.06)
    for each in outlook.expectations:
        assert each.interval[0] < each.acceptance_length < each.interval[1]
        assert each.speedup == pytest.approx(each.acceptance_length / 1.35)
        assert each.speedup_interval[0] < each.speedup < each.speedup_interval[1]
    assert outlook.next_doubling == pytest.approx(lengths[1] - lengths[0], abs=0.03)


def test_other_prompts_than_the_runs_own_widen_the_interval(tmp_path):
    run = read_run(write_run(tmp_path / "run", lambda n: 3.0 - 0.5 * (n / 2e5) ** -0.4))
    (each,) = make_outlook(run, [2], 0.01).expectations
    assert np.diff(each.interval)[0] > 3 * np.diff(each.measured)[0]


def test_when_to_stop(tmp_path):
    done = read_run(write_run(tmp_path / "done", lambda n: 3.0 - np.exp(-n / 1e4)))
    growing = read_run(write_run(tmp_path / "growing", lambda n: 2.0 + 0.2 * np.log(n / 2e5)))
    outlook = make_outlook(done, [2], 0.01)
    assert outlook.stop == outlook.tokens == 2e5
    later = make_outlook(growing, [2], 0.01)
    assert later.stop is None or later.stop > 100 * 2e5
    assert make_outlook(growing, [2], 0.2).stop == 2e5
    assert later.to_dict()["stop_interval"][1] is None or later.stop_interval[1] > 2e5
