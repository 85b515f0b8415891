"""``specdraft forecast`` from runs to its page."""

import json
from functools import partial

import pytest

from specdraft.commands.forecast import main
from tests.forecast.written import write_run


@pytest.fixture
def forecast(called):
    """forecast(words...) -> exit status, standard output, standard error."""
    return partial(called, main)


def test_plain_words_are_runs(forecast, tmp_path):
    runs = [write_run(tmp_path / name, lambda n: 3.0 - (n / 1e4) ** -0.5) for name in ("a run", "another=one")]
    output = tmp_path / "out"
    status, text, said = forecast(str(runs[0]), "factors=[3]", f"hydra.run.dir={output}")
    assert status == 0, said
    assert "a run" in text and "  x 3 " in text and (output / "forecast.html").is_file()
    (run,) = json.loads((output / "forecast.json").read_text())["runs"]
    assert run["run"] == "a run" and [each["factor"] for each in run["expectations"]] == [3]
    status, _, said = forecast(f'runs=["{runs[0]}","{runs[1]}"]', f"hydra.run.dir={output}")
    assert status == 0, said
    assert len(json.loads((output / "forecast.json").read_text())["runs"]) == 2


def test_bad_input(forecast, tmp_path):
    status, _, said = forecast(f"hydra.run.dir={tmp_path}")
    assert status == 2 and "error: there are no runs" in said
    status, _, said = forecast(str(tmp_path), f"hydra.run.dir={tmp_path}")
    assert status == 2 and "is no run that a forecast can read" in said
