"""What people read: the plain table, the page of an evaluation, and decoded text by the status of its tokens."""

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from textwrap import TextWrapper
from typing import Any

from specdraft.decoding.trace import ACCEPTED, REJECTED, Segment
from specdraft.evaluation.evaluation import Evaluation
from specdraft.evaluation.recorded import describe
from specdraft.evaluation.report.charts import cost_charts, overview_charts, temperature_charts
from specdraft.evaluation.tuning import about
from specdraft.files import write_text
from specdraft.rendering import render

_TEMPLATES = "evaluation/report/templates"
_LINES = TextWrapper(80, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


def table(evaluation: Evaluation) -> str:
    """All results as plain text: a block per temperature, then the categories. It must survive a log file.
    Only a word of more than 80 columns is wider than these."""
    values = {"evaluation": evaluation, "tuning": about(evaluation.settings), "sampling": _heading(evaluation.settings)}
    lines = render(f"{_TEMPLATES}/table.txt.jinja", **values).strip().splitlines()
    return "\n".join(_LINES.fill(line) for line in lines)


def write_report(evaluation: Evaluation, path: Path) -> Path:
    """Write the page to ``path``; the file is whole or absent."""
    return write_text(path, html(evaluation.to_dict()))


def html(evaluation: Mapping[str, Any]) -> str:
    """One page without script or network, of an evaluation as ``evaluation.json`` holds it; light or dark."""
    labels = list(dict.fromkeys(each["label"] for each in evaluation["results"]))
    values = {
        "roofline": None,  # of evaluations that were written before there was one
        **evaluation,
        "tuning": about(evaluation["settings"]),
        "sampling": _heading(evaluation["settings"]),
        "created": datetime.fromisoformat(evaluation["created"]),
        "compared": labels[: 1 + len(evaluation["settings"].get("compared", []))],
        "costs": list(cost_charts(evaluation)),
        "overview": list(overview_charts(evaluation["results"])),
        "sections": [
            (each, list(temperature_charts(evaluation, each["temperature"]))) for each in evaluation["baseline"]
        ],
        "samples": [each | {"drafted": drafted_share(each["segments"])} for each in evaluation["samples"]],
    }
    return render(f"{_TEMPLATES}/page.html.jinja", **values)


def _heading(settings: Mapping[str, Any]) -> Callable[[float], str]:
    """How was sampled at a temperature, for the part of a page that is about it."""
    return lambda temperature: describe(settings, temperature).capitalize()


def answer_page(segments: Sequence[Segment]) -> str:
    """A page of one answer and the key to its colors."""
    return render(f"{_TEMPLATES}/answer.html.jinja", segments=segments)


def drafted_share(segments: Sequence[Mapping[str, str]]) -> float:
    """The share of an answer's characters that was drafted. segments: as ``evaluation.json`` holds them."""
    drafted = sum(len(each["text"]) for each in segments if each["status"] == ACCEPTED)
    return drafted / max(sum(len(each["text"]) for each in segments if each["status"] != REJECTED), 1)
