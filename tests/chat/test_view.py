"""Every status has a color and a mark of its own, and nothing that a model writes reaches the terminal as a command."""

import pytest
from rich.style import Style

from specdraft.chat.speed import Speed
from specdraft.chat.view import STYLES, answer_text, key, printable, status_line, summary
from specdraft.decoding.trace import ACCEPTED, BONUS, CORRECTED, OWN, REJECTED, Segment

NAN = float("nan")


def test_each_segment_has_the_style_of_its_status():
    given = [Segment("ab", ACCEPTED), Segment("x\ny", REJECTED), Segment("c", CORRECTED), Segment("d", BONUS)]
    text = answer_text([Segment("_", OWN), *given])
    assert text.plain == "_abcd"
    styled = {text.plain[span.start : span.end]: span.style for span in text.spans if span.style}
    assert styled == {"ab": STYLES[ACCEPTED], "c": STYLES[CORRECTED], "d": STYLES[BONUS]}
    assert answer_text(given, show_rejected=True).plain == "abx\u21b5ycd"


def test_no_color_stands_alone():
    styles = {status: Style.parse(style) for status, style in STYLES.items()}
    marks = {status: (style.bold, style.italic, style.strike) for status, style in styles.items()}
    assert len({marks[each] for each in (ACCEPTED, REJECTED, CORRECTED, BONUS)}) == 4
    assert len({style.color for style in styles.values()}) == 5


def test_the_key_names_what_is_shown():
    assert key().plain == "accepted draft · correction · bonus · the target's own"
    assert "rejected draft" in key(show_rejected=True).plain


def test_control_characters_are_signs():
    assert printable("a\x1b[2Jb\r\n\tc\x7f\x9b") == "a␛[2Jb␍\n\tc␡\ufffd"
    assert answer_text([Segment("\x1b]0;", OWN)]).plain == "␛]0;"


@pytest.mark.parametrize(
    ("speed", "line"),
    [
        (
            Speed(True, 2.5, 20.0, 10.0, 2.0),
            "acceptance length 2.50 · 20.0 tokens/s · speedup 2.00 over plain decoding (10.0 tokens/s)",
        ),
        (Speed(True, 2.5, 20.0, NAN, NAN), "acceptance length 2.50 · 20.0 tokens/s"),
        (Speed(True, NAN, NAN, NAN, NAN), ""),
        (Speed(False, NAN, 12.34, NAN, NAN), "12.3 tokens/s, plain decoding"),
        (Speed(False, NAN, NAN, NAN, NAN), ""),
    ],
)
def test_a_status_line_says_what_was_measured(speed, line):
    assert status_line(speed) == line


def test_a_summary_is_of_several_drafted_answers(answered):
    drafted, plain = answered(21, 1.0, [3] * 5, plain=(10, 1.0)), answered(11, 2.0)
    assert summary([drafted, plain]) == ""
    assert summary([drafted, plain, drafted]) == f"2 drafted answers: {status_line(Speed.of([drafted, drafted]))}"
