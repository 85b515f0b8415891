"""Decoded text, coloured by the fate of its tokens: drafted and accepted, drafted and rejected, the target's own.

Colour is never alone: accepted text is underlined, rejected text struck through, a correction bold, any other token of
the target plain; the tags say so without any style, and the colours are told apart with any colour vision (Okabe and
Ito).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from specdraft.decoding.trace import Trace

ACCEPTED, REJECTED, CORRECTED, OWN = "accepted", "rejected", "corrected", "own"
_WINDOW, _CONTEXT = 64, 8  # tokens that are decoded at a time, and those that decide how the next ones read
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


@dataclass(frozen=True)
class Piece:
    """A stretch of text of one kind: ``ACCEPTED``, ``REJECTED``, ``CORRECTED`` or ``OWN``."""

    text: str
    kind: str


def pieces(trace: Trace, length: int, tokenizer: Any) -> list[Piece]:
    """The first ``length`` emitted tokens of a trace as text, each round's rejected tokens before the target's own.

    Without a tokenizer tokens are shown as numbers.
    """
    text = _Text(tokenizer)
    found = [Piece(text.add([trace.first_token]), OWN)]
    left = length - 1
    for each in trace.rounds:
        if left <= 0:
            break
        kept = each.drafted[: min(each.accepted, left)]
        found.append(Piece(text.add(kept), ACCEPTED))
        left -= len(kept)
        if left > 0:
            rejected = each.drafted[each.accepted :]
            found.append(Piece(text.instead(rejected), REJECTED))
            found.append(Piece(text.add([each.next_token]), CORRECTED if rejected else OWN))
            left -= 1
    return [piece for piece in found if piece.text]


def coloured(found: Sequence[Piece]) -> str:
    """HTML; with ``STYLE`` in its page it is coloured."""
    return f'<pre class="sample">{"".join(_marked(piece) for piece in found)}</pre>'


def _marked(piece: Piece) -> str:
    """Indentation is not underlined, except where it is all there is; that of a rejected draft goes with it."""
    tag, bare = _TAGS[piece.kind], piece.text.lstrip() or piece.text
    if piece.kind == REJECTED:
        bare = piece.text
    return f"{piece.text.removesuffix(bare)}<{tag}>{escape(bare)}</{tag}>"


class _Text:
    """Token ids that become text piece by piece: what a token adds depends on those before it."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.ids: list[int] = []  # the last ones
        self.shown = 0  # characters handed out

    def add(self, ids: Sequence[int]) -> str:
        """The text that these ids add. Half a character waits for its other half."""
        self.ids += ids
        text = self._decode(self.ids)
        whole = text.rstrip("\ufffd")
        added, self.shown = whole[self.shown :], max(self.shown, len(whole))
        if len(self.ids) > _WINDOW and text == whole:  # to decode all of it each time would take quadratic time
            self.ids = self.ids[-_CONTEXT:]
            self.shown = len(self._decode(self.ids))
        return added

    def instead(self, ids: Sequence[int]) -> str:
        """The text that these ids would add."""
        return self._decode([*self.ids, *ids]).rstrip("\ufffd")[self.shown :] if ids else ""

    def _decode(self, ids: list[int]) -> str:
        if self.tokenizer is None:
            return "".join(f"{token} " for token in ids)
        return str(self.tokenizer.decode(ids, skip_special_tokens=True))
