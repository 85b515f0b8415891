"""Charts: axes that hold every value, marks where the values are, and files that stand alone."""

import re
from xml.etree import ElementTree

import pytest

from specdraft.evaluation.report.svg import Chart, Point, Series, round_ticks

XMLNS = "{http://www.w3.org/2000/svg}"


def drawn(chart: Chart) -> ElementTree.Element:
    return ElementTree.fromstring(chart.to_svg())


def texts(svg: ElementTree.Element) -> list[str]:
    return [element.text for element in svg.iter(f"{XMLNS}text")]


def marks(svg: ElementTree.Element) -> dict[str, tuple[float, ...]]:
    """Where each mark with a title is."""
    found = {}
    for element in svg.iter(f"{XMLNS}path"):
        title = element.find(f"{XMLNS}title")
        if title is not None:
            found[title.text] = tuple(map(float, re.findall(r"[\d.]+", element.get("transform"))))
    return found


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0, 1, [0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        (0, 0.66, [0, 0.2, 0.4, 0.6, 0.8]),
        (1, 2.4, [1, 1.5, 2, 2.5]),
        (0, 237, [0, 50, 100, 150, 200, 250]),
        (3, 3, [3, 3.2, 3.4, 3.6, 3.8, 4]),
        (0, 3e-5, [0, 1e-5, 2e-5, 3e-5]),
    ],
)
def test_round_ticks(low, high, expected):
    assert round_ticks(low, high) == pytest.approx(expected)


def test_ticks_hold_both_ends():
    for high in (0.013, 0.4999, 1.0001, 7, 9.99, 64, 1234.5):
        ticks = round_ticks(0.0, high)
        assert 3 <= len(ticks) <= 7 and ticks[0] <= 0 and ticks[-1] >= high > ticks[-2]


def test_lines_hold_their_intervals_and_the_height_where_nothing_is_gained():
    series = [Series("a", [Point(8, 0.5, (0.4, 0.9)), Point(1, 0.2)]), Series("b", [Point(4, None), Point(8, 0.1)])]
    chart = Chart("c", "lines", series, "K", one=True)
    assert chart.places == [1, 4, 8] and chart.ticks[-1] == 1.0
    assert chart.along(0.5) == 0.5 and chart.along(-3) == 0
    svg = drawn(chart)
    assert svg.get("aria-label") == "c" and svg.find(f"{XMLNS}path[@class='one']") is not None
    found = marks(svg)
    assert set(found) == {"a, K 8: 0.5 [0.4, 0.9]", "a, K 1: 0.2", "b, K 8: 0.1"}
    (x8, y8), (x1, y1) = found["a, K 8: 0.5 [0.4, 0.9]"], found["a, K 1: 0.2"]
    assert x8 - x1 == pytest.approx(2 * 288 / 3, abs=0.2) and y1 - y8 == pytest.approx(0.3 * 150, abs=0.2)
    whisker = next(path.get("d") for path in svg.iter(f"{XMLNS}path") if "V" in path.get("d"))
    low, high = map(float, re.match(r"M[\d.]+ ([\d.]+)V([\d.]+)", whisker).groups())
    assert low - y8 == pytest.approx(0.1 * 150, abs=0.2) and y8 - high == pytest.approx(0.4 * 150, abs=0.2)


def test_a_line_joins_its_points_and_measured_points_are_hollow():
    modeled, measured = [Point(1, 1.0), Point(2, 2.0)], [Point(2, 1.5)]
    svg = drawn(Chart("c", "lines", [Series("m", modeled, number=5), Series("n", measured, False, 5)], "K"))
    groups = [group for group in svg.iter(f"{XMLNS}g") if group.get("class") == "series-1"]  # 5 of 4 colors
    assert len(groups) == len(list(svg.iter(f"{XMLNS}g"))) == 4  # two in the legend
    joined = [path.get("d") for path in svg.iter(f"{XMLNS}path") if "L" in path.get("d")]
    (x1, y1), (x2, y2) = marks(svg)["m, K 1: 1"], marks(svg)["m, K 2: 2"]
    assert joined == [f"M{x1} {y1}L{x2} {y2}"]
    assert len(list(svg.iterfind(f".//{XMLNS}path[@class='hollow']"))) == 2  # one in the legend


def test_bars_are_as_high_as_their_share():
    svg = drawn(
        Chart("c", "bars", [Series("a", [Point(0, 0.4), Point(1, 0.1)]), Series("b", [Point(1, 0.2)])], "taken")
    )
    heights = {bar[0].text: float(bar.get("height")) for bar in svg.iter(f"{XMLNS}rect") if len(bar)}
    assert heights == {"a, 0 taken: 40.0 %": 150, "a, 1 taken: 10.0 %": 37.5, "b, 1 taken: 20.0 %": 75}
    assert "40%" in texts(svg) and "taken" in texts(svg)


def test_a_row_for_each_place_and_a_color_for_each_series_wherever_it_has_no_value():
    series = [Series("a", [Point("one", None)]), Series("b", [Point("a name that is too long", 2.0, (1.5, 2.5))])]
    chart = Chart("c", "rows", series, "tokens", start=1.0)
    assert chart.places == ["one", "a name that is too long"] and chart.ticks[0] == 1
    svg = drawn(chart)
    assert {"one", "a name …too long"} <= set(texts(svg)) and "a" not in texts(svg)
    ((title, (x, _)),) = marks(svg).items()
    assert title == "b, a name that is too long: 2 [1.5, 2.5]"
    assert x == pytest.approx(118 + 204 * chart.along(2.0), abs=0.1)
    assert {group.get("class") for group in svg.iter(f"{XMLNS}g")} == {"series-1"}


@pytest.mark.parametrize("kind", ["lines", "bars", "rows"])
def test_names_cannot_break_a_chart_and_nothing_to_draw_is_no_error(kind):
    name = "<script>&\"'"
    svg = drawn(Chart(name, kind, [Series(name, [Point(name if kind == "rows" else 1, 0.5)])], name))
    assert svg.get("aria-label") == name and texts(svg).count(name) >= 2
    assert len(texts(drawn(Chart("c", kind, [Series("a", [])], "K")))) >= 2
