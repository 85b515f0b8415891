"""Charts as SVG: lines with intervals, bars, and rows of points. ``templates/chart.jinja`` draws them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import count, takewhile
from math import floor
from typing import Any, Literal

from specdraft.rendering import render

_COLORS = 4  # that the template has


@dataclass(frozen=True)
class Point:
    """A value at a place (a number, or the name of a row), perhaps with an interval. Without a value only its place."""

    x: float | str
    y: float | None
    interval: Sequence[float] | None = None


@dataclass(frozen=True)
class Series:
    """Points of one name. line: whether they are joined; number: which color and mark, by default its own place."""

    name: str
    points: Sequence[Point]
    line: bool = True
    number: int | None = None


@dataclass(frozen=True)
class Chart:
    """Series over the same places: in a row for each place, else upright, with numbers as places.
    label: of the axis along the bottom. start: where the axis of the values begins. one: mark the height of 1, where
    nothing is gained. Bars are shares of a whole, shown in per cent."""

    caption: str
    kind: Literal["lines", "bars", "rows"]
    series: Sequence[Series]
    label: str
    start: float = 0.0
    one: bool = False

    @cached_property
    def drawn(self) -> list[Series]:
        """The series that have values, with nothing but these, and their number."""
        numbered = [
            replace(
                each,
                points=[point for point in each.points if point.y is not None],
                number=(place if each.number is None else each.number) % _COLORS,
            )
            for place, each in enumerate(self.series)
        ]
        return [each for each in numbered if each.points]

    @cached_property
    def places(self) -> list[Any]:
        """What the values stand over: numbers in ascending order, rows in the order in which they first appear."""
        found = dict.fromkeys(point.x for each in self.series for point in each.points)
        return list(found) if self.kind == "rows" else sorted(found)

    @cached_property
    def ticks(self) -> list[float]:
        """Round numbers that hold the start, all values and the upper ends of their intervals."""
        points = [point for each in self.drawn for point in each.points]
        highest = [value for point in points for value in (point.y, *(point.interval or ())[1:]) if value is not None]
        return round_ticks(self.start, max([*highest, 1.0 if self.one or not highest else 0.0]))

    def along(self, value: float) -> float:
        """Where a value lies on the axis, as a share of its length; what is below its start lies there."""
        first, last = self.ticks[0], self.ticks[-1]
        return (max(value, first) - first) / (last - first)

    def to_svg(self) -> str:
        """The chart as a file of its own, on white."""
        return render("evaluation/report/templates/chart.svg.jinja", chart=self)


def round_ticks(low: float, high: float) -> list[float]:
    """Three to six round numbers that hold both ends."""
    high = high if high > low else low + 1.0
    power = 10.0 ** int(f"{high - low:e}".partition("e")[2])  # of ten, that of the first digit
    step = next(size * power for size in (0.1, 0.2, 0.25, 0.5, 1.0, 2.0) if high - low <= 5 * size * power)
    first = step * floor(low / step + 1e-9)
    return [round(first + step * n, 10) for n in takewhile(lambda n: first + step * (n - 1) < high - 1e-9, count())]
