"""Would the first half of a run have foreseen its second? What a forecast is worth, by the run's own measurements."""

from dataclasses import dataclass

import numpy as np

from specdraft.forecast.outlook import Interval, fit_run, measured_interval
from specdraft.forecast.runs import FEWEST, Run

SEEN = 0.5  # of the steps


@dataclass(frozen=True)
class Hindsight:
    """The last measurement of a run, as its first half foresaw it. ``tokens``: of that half. ``interval``: where a live
    measurement on the run's own prompts was to lie with a confidence of 90 %. ``held`` of ``hidden`` measurements of
    the second half lay where they were foreseen."""

    run: str
    tokens: float
    expected: float
    interval: Interval
    measured: float
    held: int
    hidden: int


def look_back(run: Run, seed: int = 0) -> Hindsight | None:
    """Forecast the second half from the first; None where either has too few measurements."""
    half = run.first(SEEN)
    later = range(len(half.steps), len(run.steps))
    if len(half.steps) < FEWEST or not later:
        return None
    curves = fit_run(half, seed)
    intervals = [measured_interval(curves, float(run.tokens[i]), float(run.decay[i]), seed) for i in later]
    held = sum(low <= float(run.lengths[i]) <= high for i, (low, high) in zip(later, intervals, strict=True))
    return Hindsight(
        run=run.name,
        tokens=float(half.tokens[-1]),
        expected=float(np.median(curves.at(float(run.tokens[-1]), float(run.decay[-1])))),
        interval=intervals[-1],
        measured=float(run.lengths[-1]),
        held=held,
        hidden=len(later),
    )
