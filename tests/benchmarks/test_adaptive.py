"""The length that drafts as long as pay are compared with is not the luckiest of several."""

from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def test_the_best_length_is_what_the_other_turns_say(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from adaptive import beside_best

    rates = {"K=1": [100.0, 120.0, 101.0], "K=2": [110.0, 90.0, 111.0], "goodput": [105.0, 105.0, 105.0]}
    # Without the first turn K=1 is ahead (110.5 and 100.5), without the second K=2, without the third K=1 again.
    assert beside_best(rates, ["K=1", "K=2"]) == pytest.approx([105 / 100, 105 / 90, 105 / 101])
    better = rates | {"K=1": [100.0, 99.0, 101.0], "K=2": [110.0, 112.0, 111.0]}
    assert beside_best(better, ["K=1", "K=2"]) == pytest.approx([105 / 110, 105 / 112, 105 / 111])
