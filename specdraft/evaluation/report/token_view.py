"""Decoded text, colored by the status of its tokens: drafted and accepted, drafted and rejected, the target's own.

Color is never alone: accepted text is underlined, rejected text struck through, a correction bold, any other token of
the target plain; the tags say so without any style, and the colors are told apart with any color vision (Okabe and
Ito).
"""

from collections.abc import Sequence
from html import escape

from specdraft.decoding.trace import ACCEPTED, CORRECTED, OWN, REJECTED, Segment

_TAGS = {ACCEPTED: "u", REJECTED: "s", CORRECTED: "b", OWN: "i"}

STYLE = """
.sample { white-space: pre-wrap; overflow-wrap: anywhere; font: 13px/1.65 ui-monospace, monospace; margin: 0;
  --accepted: #0072b2; --rejected: #b34700; }
.sample u { color: var(--accepted); text-decoration-thickness: 1px; text-underline-offset: 3px; }
.sample s { color: var(--rejected); font-size: .85em; } .sample i { font-style: normal; }
@media (prefers-color-scheme: dark) { .sample { --accepted: #7cc4f2; --rejected: #f0a35e; } }
"""
KEY = (
    '<p class="sample"><u>drafted and accepted</u> · <s>drafted and rejected</s> · <b>corrected by the target</b> · '
    "<i>the target's own, behind a whole draft</i></p>"
)


def colored(segments: Sequence[Segment]) -> str:
    """HTML; with ``STYLE`` in its page it is colored."""
    return f'<pre class="sample">{"".join(_marked(segment) for segment in segments)}</pre>'


def _marked(segment: Segment) -> str:
    """Indentation is not underlined, except where it is all there is; that of a rejected draft goes with it."""
    tag, bare = _TAGS[segment.status], segment.text.lstrip() or segment.text
    if segment.status == REJECTED:
        bare = segment.text
    return f"{segment.text.removesuffix(bare)}<{tag}>{escape(bare)}</{tag}>"
