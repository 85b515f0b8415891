"""Decoded text, colored by the status of its tokens: drafted and accepted, drafted and rejected, the target's own.

Color is never alone: accepted text is underlined, rejected text struck through, a correction bold, any other token of
the target plain; the tags say so without any style, and the colors are told apart with any color vision (Okabe and
Ito).
"""

from collections.abc import Sequence

from markupsafe import Markup

from specdraft.decoding.trace import ACCEPTED, CORRECTED, OWN, REJECTED, Segment
from specdraft.evaluation.report.templates import ENVIRONMENT

_TAGS = {ACCEPTED: "u", REJECTED: "s", CORRECTED: "b", OWN: "i"}


def colored(segments: Sequence[Segment]) -> Markup:
    """HTML; with ``token_view.css`` in its page it is colored."""
    macros = ENVIRONMENT.get_template("token_view.html.jinja").module
    return Markup(macros.answer([_marked(segment) for segment in segments]))  # type: ignore[attr-defined]


def page(segments: Sequence[Segment]) -> str:
    """A page of its own, with what the marks mean."""
    template = ENVIRONMENT.get_template("token_view.html.jinja")
    return template.render(segments=[_marked(each) for each in segments]).strip()


def _marked(segment: Segment) -> tuple[str, str, str]:
    """Text before the mark, tag, marked text.

    Indentation is not underlined, except where it is all there is; that of a rejected draft goes with it.
    """
    marked = segment.text if segment.status == REJECTED else segment.text.lstrip() or segment.text
    return segment.text.removesuffix(marked), _TAGS[segment.status], marked
