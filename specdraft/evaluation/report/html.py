"""The evaluation as one HTML page: no script, no network; it follows the reader's light or dark mode."""

from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from specdraft.evaluation.evaluation import Evaluation
from specdraft.evaluation.report.charts import cost_charts, overview_charts, temperature_charts
from specdraft.evaluation.report.rendering import render
from specdraft.evaluation.report.token_view import drafted_share
from specdraft.files import atomic_file


def write_report(evaluation: Evaluation, path: Path) -> Path:
    """Write the page to ``path``; the file is whole or absent."""
    with atomic_file(path) as temporary:
        temporary.write_text(html(evaluation.to_dict()), encoding="utf-8")
    return path


def html(evaluation: Mapping[str, Any]) -> str:
    """The page of an evaluation as ``Evaluation.to_dict`` gives it and ``evaluation.json`` holds it."""
    labels = list(dict.fromkeys(each["label"] for each in evaluation["results"]))
    values = {
        **evaluation,
        "created": datetime.fromisoformat(evaluation["created"]),
        "compared": labels[: 1 + len(evaluation["settings"].get("compared", []))],
        "costs": list(cost_charts(evaluation)),
        "overview": list(overview_charts(evaluation["results"])),
        "sections": [
            (alone, list(temperature_charts(evaluation, alone["temperature"]))) for alone in evaluation["baseline"]
        ],
        "samples": [each | {"drafted": drafted_share(each["segments"])} for each in evaluation["samples"]],
    }
    return render("page.html.jinja", **values)
