"""Answers as colored text: each status a color and a mark of its own, the key to them, and what was measured."""

import math
from collections.abc import Sequence

from rich.text import Text

from specdraft.chat.conversation import Answer
from specdraft.chat.speed import Speed
from specdraft.decoding.trace import ACCEPTED, BONUS, CORRECTED, OWN, REJECTED, Segment

# Named colors are those of the terminal's theme; no color stands alone, as in the report.
STYLES = {ACCEPTED: "cyan", REJECTED: "dim red strike", CORRECTED: "bold magenta", BONUS: "italic green", OWN: ""}
_KEY = {
    ACCEPTED: "accepted draft",
    REJECTED: "rejected draft",
    CORRECTED: "correction",
    BONUS: "bonus",
    OWN: "the target's own",
}
_NEW_LINE = "\u21b5"
# Control characters, which could do anything to a terminal, as signs of their own; lines and tabs stay.
_SIGNS = {code: chr(0x2400 + code) for code in range(0x20) if chr(code) not in "\n\t"} | {0x7F: "\u2421"}
_SIGNS |= dict.fromkeys(range(0x80, 0xA0), "\ufffd")


def printable(text: str) -> str:
    """The text without control characters."""
    return text.translate(_SIGNS)


def answer_text(segments: Sequence[Segment], show_rejected: bool = False) -> Text:
    """The segments in their colors; rejected drafts are left out unless asked for, and their lines are not broken."""
    text = Text()
    for each in segments:
        if each.status != REJECTED:
            text.append(printable(each.text), STYLES[each.status])
        elif show_rejected:
            text.append(printable(each.text).replace("\n", _NEW_LINE), STYLES[each.status])
    return text


def key(show_rejected: bool = False) -> Text:
    """What the colors mean."""
    shown = [(name, STYLES[status]) for status, name in _KEY.items() if show_rejected or status != REJECTED]
    return Text(" \u00b7 ").join(Text(name, style) for name, style in shown)


def summary(answers: Sequence[Answer]) -> str:
    """The status line of all drafted answers together; nothing if they are fewer than two."""
    drafted = [answer for answer in answers if answer.drafted]
    return "" if len(drafted) < 2 else f"{len(drafted)} drafted answers: {status_line(Speed.of(drafted))}"


def status_line(speed: Speed) -> str:
    """Acceptance length, tokens a second and speedup, as far as they were measured."""
    if not speed.drafted:
        return "" if math.isnan(speed.tokens_per_second) else f"{speed.tokens_per_second:.1f} tokens/s, plain decoding"
    values = {
        "acceptance length {:.2f}": speed.acceptance_length,
        "{:.1f} tokens/s": speed.tokens_per_second,
        f"speedup {{:.2f}} over plain decoding ({speed.plain_tokens_per_second:.1f} tokens/s)": speed.speedup,
    }
    return " \u00b7 ".join(words.format(value) for words, value in values.items() if not math.isnan(value))
