"""How much data and training is enough? Learning curves of acceptance, from the live measurements of short runs."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from specdraft.errors import UserError
from specdraft.evaluation.report.svg import Chart
from specdraft.forecast.advice import advise
from specdraft.forecast.hindsight import look_back
from specdraft.forecast.levers import compare, data_curve, seed_spread
from specdraft.forecast.outlook import CONFIDENCE, make_outlook
from specdraft.forecast.report import curves_charts, html, table
from specdraft.forecast.runs import read_run

__all__ = ["forecast", "html", "table"]


def forecast(
    directories: Sequence[str | Path], factors: Sequence[float] = (2, 10, 100), worth: float = 0.01, seed: int = 0
) -> tuple[dict[str, Any], list[Chart]]:
    """What to expect of the runs at multiples of their tokens, which lever pays, and when to stop: as JSON holds it,
    and its charts. ``worth``: the share of the acceptance length that a doubling must bring to be worth it.
    Raises UserError for what is no run, for too few measurements, and for numbers out of range."""
    if not directories:
        raise UserError("there are no runs: expected at least one directory, as in specdraft forecast RUN")
    several = isinstance(factors, Sequence) and len(factors) > 0
    if not (several and all(isinstance(each, int | float) and each >= 1 for each in factors)):
        raise UserError(f"factors is {factors}: expected a list of numbers of at least 1, times the tokens of a run")
    if not (isinstance(worth, int | float) and 0 < worth < 1):
        raise UserError(f"worth is {worth}: expected a share of the acceptance length between 0 and 1, such as 0.01")
    runs = [read_run(each) for each in directories]
    outlooks = [make_outlook(run, list(factors), worth, seed) for run in runs]
    comparisons, curve = list(compare(runs)), data_curve(runs)
    found = {
        "confidence": CONFIDENCE,
        "runs": [each.to_dict() for each in outlooks],
        "hindsight": [asdict(seen) for run in runs if (seen := look_back(run, seed)) is not None],
        "comparisons": [asdict(each) for each in comparisons],
        "data": None if curve is None else asdict(curve),
        "seed_spread": seed_spread(runs),
        "advice": advise(runs, outlooks, comparisons, curve),
    }
    return found, curves_charts(runs, outlooks)
