"""What people read of a forecast: the table, and a page with the curves."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from specdraft.evaluation.report.svg import Chart, Point, Series
from specdraft.forecast.outlook import Outlook
from specdraft.forecast.runs import Run
from specdraft.rendering import render

_SEEN = (0.125, 0.25, 0.5)  # shares of a run, where its measurements are drawn
_TOGETHER = 2  # runs of a chart, measured and expected
Record = Mapping[str, Any]


def table(forecast: Record) -> str:
    """All that is expected, as plain text."""
    return render("forecast/templates/table.txt.jinja", forecast=forecast).strip("\n")


def html(forecast: Record, charts: Sequence[Chart]) -> str:
    """One page without script or network; light or dark."""
    return render("forecast/templates/page.html.jinja", forecast=forecast, charts=charts)


def curves_charts(runs: Sequence[Run], outlooks: Sequence[Outlook]) -> list[Chart]:
    """Acceptance over tokens, measured and expected; each place of the axis is some times as far as the one before."""
    charts = []
    for start in range(0, len(runs), _TOGETHER):
        series = []
        pairs = zip(runs[start : start + _TOGETHER], outlooks[start : start + _TOGETHER], strict=True)
        for number, (run, outlook) in enumerate(pairs):
            near = [int(np.abs(run.tokens - share * run.tokens[-1]).argmin()) for share in _SEEN]
            measured = [Point(_millions(run.tokens[i]), float(run.lengths[i])) for i in dict.fromkeys(near)]
            measured.append(Point(_millions(outlook.tokens), outlook.acceptance_length))
            expected = [Point(_millions(e.tokens), e.acceptance_length, e.interval) for e in outlook.expectations]
            series.append(Series(f"{run.name}, measured", measured, number=2 * number))
            series.append(Series(f"{run.name}, expected", expected, number=2 * number + 1))
        charts.append(Chart("Acceptance length over tokens", "lines", series, "million tokens", start=1.0))
    return charts


def _millions(tokens: float) -> float:
    return float(f"{tokens / 1e6:.3g}")
