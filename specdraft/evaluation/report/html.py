"""The evaluation as one HTML page: no script, no network; it follows the reader's light or dark mode."""

from collections.abc import Iterable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from markupsafe import Markup

from specdraft.decoding.trace import ACCEPTED, REJECTED, Segment
from specdraft.evaluation.evaluation import Evaluation
from specdraft.evaluation.report import token_view
from specdraft.evaluation.report.charts import cost_charts, overview_charts, temperature_charts
from specdraft.evaluation.report.templates import ENVIRONMENT
from specdraft.files import atomic_file


def write_report(evaluation: Evaluation, path: Path) -> Path:
    """Write the page to ``path``; the file is whole or absent."""
    with atomic_file(path) as temporary:
        temporary.write_text(html(evaluation.to_dict()), encoding="utf-8")
    return path


def html(evaluation: Mapping[str, Any]) -> str:
    """The page of an evaluation as ``Evaluation.to_dict`` gives it and ``evaluation.json`` holds it."""
    settings, results = evaluation["settings"], evaluation["results"]
    labels = list(dict.fromkeys(row["label"] for row in results))
    sections = []
    for baseline in evaluation["baseline"]:
        here, categories = (
            [row for row in evaluation[name] if row["temperature"] == baseline["temperature"]]
            for name in ("results", "categories")
        )
        charts = _markup(temperature_charts(here, categories))
        sections.append({"baseline": baseline, "results": here, "categories": categories, "charts": charts})
    return ENVIRONMENT.get_template("report.html.jinja").render(
        evaluation=evaluation,
        settings=settings,
        first=results[0],
        compared=labels[: 1 + len(settings.get("compared", []))],
        created=datetime.fromisoformat(evaluation["created"]).strftime("%Y-%m-%d %H:%M %Z"),
        machine={**evaluation["machine"], **evaluation["versions"]},
        costs=_markup(cost_charts(evaluation)),
        overview=_markup(overview_charts(results, labels)),
        sections=sections,
        samples=[_sample(each) for each in evaluation["samples"]],
    )


def _sample(recorded: Mapping[str, Any]) -> dict[str, Any]:
    found = [Segment(**segment) for segment in recorded["segments"]]
    shown = sum(len(segment.text) for segment in found if segment.status != REJECTED)
    drafted = sum(len(segment.text) for segment in found if segment.status == ACCEPTED)
    return {**recorded, "share": drafted / max(shown, 1), "text": token_view.colored(found)}


def _markup(named: Iterable[tuple[str, str]]) -> list[tuple[str, Markup]]:
    return [(caption, Markup(svg)) for caption, svg in named]
