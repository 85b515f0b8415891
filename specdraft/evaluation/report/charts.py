"""Which charts an evaluation has, from the evaluation as JSON holds it."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from specdraft.errors import UserError
from specdraft.evaluation.report.svg import Chart, Point, Series
from specdraft.files import atomic_file

Record = Mapping[str, Any]


def all_charts(evaluation: Record) -> Iterator[Chart]:
    """Every chart of the page, in its order."""
    yield from cost_charts(evaluation)
    yield from overview_charts(evaluation["results"])
    for temperature in _in_order(evaluation["results"], "temperature"):
        for chart in temperature_charts(evaluation, temperature):
            yield replace(chart, caption=f"{chart.caption}, temperature {temperature:g}")


def cost_charts(evaluation: Record) -> Iterator[Chart]:
    """Speedup by K, by size of the tree, and by batch size: as modeled, and where it was measured."""
    models = [(f"{each['drafter']}, temperature {each['temperature']:g}", each) for each in evaluation["cost_models"]]
    batch_size = evaluation["settings"].get("batch_size", 1)  # evaluations that do not say had one
    requests = "one request" if batch_size == 1 else f"{batch_size} requests side by side"
    for kind, size, label in (("chain", "length", "drafted tokens K"), ("tree", "size", "nodes of the tree")):
        caption, series = f"By {size} of the {kind}, {requests}", []
        for number, (name, model) in enumerate(models):
            modeled = [one for one in model["predictions"] if one["batch_size"] == batch_size and one["kind"] == kind]
            drafts = [_draft(model | each) for each in modeled]
            measured = [each for each in evaluation["checks"] if _draft(each) in drafts]
            series.append(Series(name, _points(modeled, "tokens", "speedup"), number=number))
            series.append(Series(f"{name}, measured", _points(measured, "tokens", "speedup"), False, number))
        chart = Chart(caption, "lines", series, label, one=True)
        if chart.drawn:
            yield chart
    series = []
    for number, (name, model) in enumerate(models):
        best: dict[int, float] = {}
        for each in model["predictions"]:
            if each["kind"] == "chain":
                best[each["batch_size"]] = max(each["speedup"], best.get(each["batch_size"], 0.0))
        series.append(Series(name, [Point(size, speedup) for size, speedup in best.items()], number=number))
    chart = Chart("By batch size, best chain of each", "lines", series, "requests side by side", one=True)
    if len(chart.places) > 1:
        yield chart


def overview_charts(results: Sequence[Record]) -> Iterator[Chart]:
    """Drafters beside each other, and temperatures, if there are several of either."""
    if len({(each["label"], each["temperature"]) for each in results}) == 1:
        return
    named = [{**each, "row": f"temperature {each['temperature']:g}"} for each in results]
    for value, caption, label in (
        ("acceptance_length", "Acceptance length", "tokens a round"),
        ("speedup", "Measured speedup, prompts included", "times as fast as without drafting"),
    ):
        yield Chart(caption, "rows", _by_drafter(named, "label", "row", value), label)


def temperature_charts(evaluation: Record, temperature: float) -> Iterator[Chart]:
    """What was accepted at one temperature: by position, as a histogram, by category."""
    results, categories = (
        [each for each in evaluation[name] if each["temperature"] == temperature] for name in ("results", "categories")
    )
    series = []
    for each in results:
        rates = zip(each["conditional_acceptance_rate"], each["conditional_acceptance_interval"], strict=True)
        series.append(Series(each["label"], [Point(i, *rate) for i, rate in enumerate(rates, start=1)]))
    yield Chart("Acceptance by position reached", "lines", series, "position in the draft")
    series = [Series(each["label"], _histogram(each)) for each in results]
    yield Chart("Accepted tokens of a round", "bars", series, "accepted tokens")
    if categories:
        series = _by_drafter(categories, "drafter", "category", "acceptance_length")
        yield Chart("Acceptance length by category", "rows", series, "tokens a round", start=1.0)


def _by_drafter(records: Sequence[Record], name: str, place: str, value: str) -> list[Series]:
    return [
        Series(drafter, _points([each for each in records if each[name] == drafter], place, value))
        for drafter in _in_order(records, name)
    ]


def _points(records: Sequence[Record], place: str, value: str) -> list[Point]:
    return [Point(each[place], each[value], each.get(f"{value}_interval")) for each in records]


def _draft(record: Record) -> tuple[Any, ...]:
    return record["drafter"], record["temperature"], record["draft"]


def _in_order(records: Sequence[Record], key: str) -> list[Any]:
    return list(dict.fromkeys(each[key] for each in records))


def _histogram(result: Record) -> list[Point]:
    """Rounds that accepted 0, 1, ... K tokens, as shares: differences of how many accepted at least so many."""
    at_least = [result["rounds"], *result["accepted_per_position"], 0]
    if not result["rounds"]:
        return []
    return [Point(i, (at_least[i] - at_least[i + 1]) / result["rounds"]) for i in range(len(at_least) - 1)]


def check_png() -> None:
    """Raise UserError unless charts can be drawn as PNG."""
    try:
        import resvg_py  # noqa: F401
    except ImportError:
        missing = "png=true draws charts with resvg_py, which is not installed"
        raise UserError(f"{missing}: pip install 'specdraft[plots]', or set png=false") from None


def write_png(evaluation: Record, folder: Path, width: int = 1020) -> list[Path]:
    """Every chart as a PNG file of ``width`` pixels. Raises UserError as ``check_png`` does."""
    check_png()
    import resvg_py

    paths = []
    for number, chart in enumerate(all_charts(evaluation), start=1):
        name = "-".join("".join(c if c.isalnum() or c == "." else " " for c in chart.caption.lower()).split())
        path = folder / f"{number:02d}-{name}.png"
        with atomic_file(path) as temporary:
            temporary.write_bytes(bytes(resvg_py.svg_to_bytes(svg_string=chart.to_svg(), width=width)))
        paths.append(path)
    return paths
