"""Charts as SVG: lines with intervals, bars, and rows of points. No script, no library.

Series are told apart by color (after Okabe and Ito, for any color vision) and by the shape of their marks or the tint
of their bars. Colors are attributes, so that an SVG stands alone; a page overrides them by class in dark mode.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from itertools import count, takewhile
from math import floor

WIDTH = 340
COLORS = ("#0072b2", "#c75000", "#007a5a", "#a3478a")
_TEXT, _LINE = "#4f5969", "#d5dae2"
_LEFT, _RIGHT, _ROW = 42, 10, 17


@dataclass(frozen=True)
class Point:
    """A value at x (a number, or the number of a row), perhaps with an interval."""

    x: float
    y: float
    interval: Sequence[float] | None = None


@dataclass(frozen=True)
class Series:
    """Points of one name. line: whether they are joined; number: which color and mark, by default its own place."""

    name: str
    points: Sequence[Point]
    line: bool = True
    number: int | None = None


def lines(title: str, series: Sequence[Series], x_label: str, y_from: float = 0.0, one: bool = False) -> str:
    """Points over numbers. y_from: where the axis begins; one: mark the height of 1, where nothing is gained."""
    drawn = [each for each in series if each.points]
    xs = sorted({point.x for each in drawn for point in each.points})
    tops = [value for each in drawn for p in each.points for value in (p.y, *(p.interval or ())[1:])]
    ticks = _ticks(y_from, max([*tops, 1.0 if one else 0.0], default=1.0))
    top, height = 12 + _ROW * len(drawn), 150
    bottom = top + height
    x_of = {x: _LEFT + (WIDTH - _LEFT - _RIGHT) * (place + 0.5) / len(xs) for place, x in enumerate(xs)}

    def y_of(value: float) -> float:
        return bottom - height * (max(value, ticks[0]) - ticks[0]) / (ticks[-1] - ticks[0])

    parts = [_legend(drawn), *(_grid(y_of(tick), _number(tick)) for tick in ticks)]
    if one:
        parts.append(_path(f"M{_LEFT} {y_of(1):.1f}H{WIDTH - _RIGHT}", _TEXT, "t-line", 'stroke-dasharray="4 3"'))
    parts += [_text(x, bottom + 16, _number(value), "middle") for value, x in x_of.items()]
    parts.append(_text((_LEFT + WIDTH - _RIGHT) / 2, bottom + 34, x_label, "middle"))
    for place, each in enumerate(drawn):
        number = (place if each.number is None else each.number) % len(COLORS)
        shift = 3.5 * (place - (len(drawn) - 1) / 2) if any(p.interval for p in each.points) else 0.0
        where = [(x_of[p.x] + shift, y_of(p.y), p) for p in each.points]
        if each.line:
            way = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y, _ in where)
            parts.append(_path(way, COLORS[number], f"s{number}", 'stroke-width="1.8"'))
        for x, y, point in where:
            if point.interval is not None:
                low, high = (y_of(value) for value in point.interval)
                way = f"M{x:.1f} {low:.1f}V{high:.1f}M{x - 3:.1f} {low:.1f}h6M{x - 3:.1f} {high:.1f}h6"
                parts.append(_path(way, COLORS[number], f"s{number}"))
            hint = f"{each.name}, {x_label} {_number(point.x)}: {point.y:.3g}{_within(point)}"
            parts.append(_mark(x, y, number, each.line, hint))
    return _svg(title, bottom + 42, parts)


def bars(title: str, series: Sequence[Series], x_label: str) -> str:
    """Shares of a whole side by side, as per cent: a histogram."""
    xs = sorted({point.x for each in series for point in each.points})
    ticks = _ticks(0.0, max((p.y for each in series for p in each.points), default=1.0))
    top, height = 12 + _ROW * len(series), 150
    bottom, slot = top + height, (WIDTH - _LEFT - _RIGHT) / max(len(xs), 1)
    thick = 0.8 * slot / len(series)
    parts = [_legend(series, squares=True)]
    for tick in ticks:
        parts.append(_grid(bottom - height * tick / ticks[-1], f"{100 * tick:.3g}%"))
    for place, x in enumerate(xs):
        parts.append(_text(_LEFT + slot * (place + 0.5), bottom + 16, _number(x), "middle"))
    for number, each in enumerate(series):
        for point in each.points:
            tall = height * point.y / ticks[-1]
            left = _LEFT + slot * (xs.index(point.x) + 0.1) + thick * number
            box = (left, bottom - tall, max(thick - 1.5, 1), tall)
            parts.append(_bar(box, number, f"{each.name}, {_number(point.x)} {x_label}: {100 * point.y:.1f} %"))
    parts.append(_text((_LEFT + WIDTH - _RIGHT) / 2, bottom + 34, x_label, "middle"))
    return _svg(title, bottom + 42, parts)


def rows(title: str, labels: Sequence[str], series: Sequence[Series], x_label: str, x_from: float = 0.0) -> str:
    """A row for each label with a point of each series: ``Point.x`` numbers the row, ``Point.y`` lies along it."""
    highest = max((v for s in series for p in s.points for v in (p.y, *(p.interval or ())[1:])), default=1.0)
    ticks = _ticks(x_from, highest)
    left, top = 118, 12 + _ROW * len(series)
    step = 12 + 11 * len(series)
    bottom = top + step * len(labels)

    def x_of(value: float) -> float:
        return left + (WIDTH - _RIGHT - 8 - left) * (max(value, ticks[0]) - ticks[0]) / (ticks[-1] - ticks[0])

    parts = [_legend(series)]
    for tick in ticks:
        parts.append(_path(f"M{x_of(tick):.1f} {top}V{bottom}", _LINE, "g"))
        parts.append(_text(x_of(tick), bottom + 16, _number(tick), "middle"))
    for row, label in enumerate(labels):
        short = label if len(label) <= 16 else label[:15] + "…"
        parts.append(_text(left - 8, top + step * (row + 0.5) + 5, short, "end"))
    for number, each in enumerate(series):
        for point in each.points:
            y = top + step * point.x + 12 + 11 * number
            if point.interval is not None:
                low, high = (x_of(value) for value in point.interval)
                parts.append(_path(f"M{low:.1f} {y:.1f}H{high:.1f}", COLORS[number % 4], f"s{number % 4}"))
            hint = f"{each.name}, {labels[int(point.x)]}: {point.y:.3g}{_within(point)}"
            parts.append(_mark(x_of(point.y), y, number % 4, True, hint))
    parts.append(_text((left + WIDTH - _RIGHT) / 2, bottom + 34, x_label, "middle"))
    return _svg(title, bottom + 42, parts)


def standalone(svg: str) -> str:
    """The chart as a file of its own, on white."""
    return svg.replace(
        "<svg ", '<svg xmlns="http://www.w3.org/2000/svg" font-family="sans-serif" font-size="12.5" ', 1
    ).replace("<g>", f'<rect width="{WIDTH}" height="1000" fill="#fff"/><g>', 1)


def _svg(title: str, height: float, parts: Sequence[str]) -> str:
    return (
        f'<svg class="chart" viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label="{escape(title)}">'
        f"<g>{''.join(parts)}</g></svg>"
    )


def _ticks(low: float, high: float) -> list[float]:
    """Three to six round numbers that hold both ends."""
    high = high if high > low else low + 1.0
    width = high - low
    power = 10.0 ** _power(width)
    step = next(size * power for size in (0.1, 0.2, 0.25, 0.5, 1.0, 2.0) if width / (size * power) <= 5)
    first = step * floor(low / step + 1e-9)
    return [round(first + step * n, 10) for n in takewhile(lambda n: first + step * (n - 1) < high - 1e-9, count())]


def _power(width: float) -> int:
    """Of ten, that of the first digit."""
    return int(f"{width:e}".partition("e")[2])


def _number(value: float) -> str:
    return f"{value:.4g}"


def _within(point: Point) -> str:
    return "" if point.interval is None else f" [{point.interval[0]:.3g}, {point.interval[1]:.3g}]"


def _text(x: float, y: float, content: str, anchor: str = "start") -> str:
    return f'<text class="t" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{_TEXT}">{escape(content)}</text>'


def _path(way: str, color: str, kind: str, more: str = "") -> str:
    return f'<path class="{kind}" d="{way}" fill="none" stroke="{color}" {more}/>'


def _grid(y: float, label: str) -> str:
    return _path(f"M{_LEFT} {y:.1f}H{WIDTH - _RIGHT}", _LINE, "g") + _text(_LEFT - 5, y + 4, label, "end")


def _mark(x: float, y: float, number: int, filled: bool, hint: str = "") -> str:
    """A circle, square, triangle or diamond; hollow where points are not joined."""
    ways = (
        f"M{x - 4:.1f} {y:.1f}a4 4 0 1 0 8 0a4 4 0 1 0 -8 0z",
        f"M{x - 3.5:.1f} {y - 3.5:.1f}h7v7h-7z",
        f"M{x:.1f} {y - 4.5:.1f}l4.5 8h-9z",
        f"M{x:.1f} {y - 5:.1f}l5 5l-5 5l-5 -5z",
    )
    fill, kind = (COLORS[number], f"f{number}") if filled else ("#fff", "fp")
    title = f"<title>{escape(hint)}</title>" if hint else ""
    return (
        f'<path class="{kind} s{number}" d="{ways[number]}" fill="{fill}" stroke="{COLORS[number]}" '
        f'stroke-width="1.6">{title}</path>'
    )


def _bar(box: tuple[float, float, float, float], number: int, hint: str = "") -> str:
    """A bar: full, or filled more lightly inside its outline."""
    x, y, width, height = box
    opacity = (1.0, 0.25, 0.6, 0.1)[number % 4]
    title = f"<title>{escape(hint)}</title>" if hint else ""
    return (
        f'<rect class="f{number % 4} s{number % 4}" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" '
        f'fill="{COLORS[number % 4]}" fill-opacity="{opacity}" stroke="{COLORS[number % 4]}">{title}</rect>'
    )


def _legend(series: Sequence[Series], squares: bool = False) -> str:
    parts = []
    for place, each in enumerate(series):
        number = (place if each.number is None else each.number) % len(COLORS)
        y = 9 + _ROW * place
        mark = _bar((_LEFT, y - 5, 9, 9), number) if squares else _mark(_LEFT + 4, y, number, each.line)
        parts.append(mark + _text(_LEFT + 16, y + 4, each.name))
    return "".join(parts)
