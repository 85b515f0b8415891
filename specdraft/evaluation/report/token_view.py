"""Decoded text, colored by the status of its tokens; ``templates/token_view.jinja`` says how."""

from collections.abc import Mapping, Sequence

from specdraft.decoding.trace import ACCEPTED, REJECTED, Segment
from specdraft.evaluation.report.rendering import render


def page(segments: Sequence[Segment]) -> str:
    """A page of one answer and the key to its colors."""
    return render("answer.html.jinja", segments=segments)


def drafted_share(segments: Sequence[Mapping[str, str]]) -> float:
    """The share of an answer's characters that was drafted. segments: as ``evaluation.json`` holds them."""
    drafted = sum(len(each["text"]) for each in segments if each["status"] == ACCEPTED)
    return drafted / max(sum(len(each["text"]) for each in segments if each["status"] != REJECTED), 1)
