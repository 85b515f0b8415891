"""Which charts an evaluation has: each a caption and an SVG, from the evaluation as JSON holds it."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from specdraft.errors import UserError
from specdraft.evaluation.report.svg import Point, Series, bars, lines, rows, standalone
from specdraft.files import atomic_file

Row = Mapping[str, Any]
Figure = tuple[str, str]


def all_charts(evaluation: Row) -> Iterator[Figure]:
    """Every chart of the page, in its order."""
    results = evaluation["results"]
    yield from cost_charts(evaluation)
    yield from overview_charts(results, list(dict.fromkeys(row["label"] for row in results)))
    for temperature in dict.fromkeys(row["temperature"] for row in results):
        here = [
            [row for row in evaluation[name] if row["temperature"] == temperature] for name in ("results", "categories")
        ]
        for caption, svg in temperature_charts(*here):
            yield f"{caption}, temperature {temperature:g}", svg


def cost_charts(evaluation: Row) -> Iterator[Figure]:
    """Speedup by K, by size of the tree, and by batch size: as modeled, and where it was measured."""
    models, checks = evaluation["cost_models"], evaluation["checks"]
    for kind, caption, label in (
        ("chain", "By length of the chain, one request", "drafted tokens K"),
        ("tree", "By size of the tree, one request", "nodes of the tree"),
    ):
        series = []
        for number, model in enumerate(models):
            name = f"{model['drafter']}, temperature {model['temperature']:g}"
            alone = [row for row in model["predictions"] if row["batch_size"] == 1 and row["kind"] == kind]
            drafts = {row["draft"] for row in alone}
            measured = [
                Point(row["tokens"], row["speedup"])
                for row in checks
                if row["draft"] in drafts
                and (row["drafter"], row["temperature"]) == (model["drafter"], model["temperature"])
                and row["speedup"] is not None
            ]
            series.append(Series(name, [Point(row["tokens"], row["speedup"]) for row in alone], number=number))
            series.append(Series(f"{name}, measured", measured, line=False, number=number))
        if any(each.points for each in series):
            yield caption, lines(caption, series, label, one=True)
    series = []
    for number, model in enumerate(models):
        best: dict[int, float] = {}
        for row in model["predictions"]:
            if row["kind"] == "chain":
                best[row["batch_size"]] = max(row["speedup"], best.get(row["batch_size"], 0.0))
        name = f"{model['drafter']}, temperature {model['temperature']:g}"
        series.append(Series(name, [Point(size, gain) for size, gain in best.items()], number=number))
    if any(len(each.points) > 1 for each in series):
        caption = "By batch size, best chain of each"
        yield caption, lines(caption, series, "requests side by side", one=True)


def overview_charts(results: Sequence[Row], drafters: Sequence[str]) -> Iterator[Figure]:
    """Drafters beside each other, and temperatures."""
    temperatures = list(dict.fromkeys(row["temperature"] for row in results))
    if len(drafters) == 1 and len(temperatures) == 1:
        return
    labels = [f"temperature {temperature:g}" for temperature in temperatures]
    for name, caption, label in (
        ("acceptance_length", "Acceptance length", "tokens a round"),
        ("speedup", "Measured speedup, prompts included", "times as fast as without drafting"),
    ):
        series = [
            Series(
                drafter,
                [
                    Point(temperatures.index(row["temperature"]), row[name], row[f"{name}_interval"])
                    for row in results
                    if row["label"] == drafter and row[name] is not None
                ],
            )
            for drafter in drafters
        ]
        yield caption, rows(caption, labels, series, label)


def temperature_charts(results: Sequence[Row], categories: Sequence[Row]) -> Iterator[Figure]:
    """What was accepted at one temperature: by position, as a histogram, by category."""
    series = []
    for row in results:
        found = zip(row["conditional_acceptance_rate"], row["conditional_acceptance_interval"], strict=True)
        points = [Point(i, rate, interval) for i, (rate, interval) in enumerate(found, 1) if rate is not None]
        series.append(Series(row["label"], points))
    caption = "Acceptance by position reached"
    yield caption, lines(caption, series, "position in the draft")
    caption = "Accepted tokens of a round"
    yield caption, bars(caption, [Series(row["label"], _histogram(row)) for row in results], "accepted tokens")
    if categories:
        labels = list(dict.fromkeys(row["category"] for row in categories))
        series = [
            Series(
                result["drafter"],
                [
                    Point(labels.index(row["category"]), row["acceptance_length"], row["acceptance_length_interval"])
                    for row in categories
                    if row["drafter"] == result["drafter"] and row["acceptance_length"] is not None
                ],
            )
            for result in results
            if not result["beside"]
        ]
        caption = "Acceptance length by category"
        yield caption, rows(caption, labels, series, "tokens a round", x_from=1.0)


def _histogram(row: Row) -> list[Point]:
    """Rounds that accepted 0, 1, ... K tokens, as shares: differences of how many accepted at least so many."""
    at_least = [row["rounds"], *row["accepted_per_position"], 0]
    if not row["rounds"]:
        return []
    return [Point(i, (at_least[i] - at_least[i + 1]) / row["rounds"]) for i in range(len(at_least) - 1)]


def check_png() -> None:
    """Raise UserError unless charts can be drawn as PNG."""
    try:
        import resvg_py  # noqa: F401
    except ImportError:
        raise UserError(
            "png=true draws charts with resvg_py, which is not installed: pip install 'specdraft[plots]', or set "
            "png=false"
        ) from None


def write_png(evaluation: Row, folder: Path, width: int = 1020) -> list[Path]:
    """Every chart as a PNG file of ``width`` pixels. Raises UserError as ``check_png`` does."""
    check_png()
    import resvg_py

    paths = []
    for number, (caption, svg) in enumerate(all_charts(evaluation), start=1):
        name = "-".join("".join(c if c.isalnum() or c == "." else " " for c in caption.lower()).split())
        path = folder / f"{number:02d}-{name}.png"
        with atomic_file(path) as temporary:
            temporary.write_bytes(bytes(resvg_py.svg_to_bytes(svg_string=standalone(svg), width=width)))
        paths.append(path)
    return paths
