"""On a terminal every token in its color when it comes, elsewhere plain text; a recording is the chat in its colors."""

import re
from io import StringIO
from xml.etree import ElementTree

import pytest
from rich.console import Console

from specdraft.chat.screen import Screen, write_svg
from specdraft.decoding.trace import ACCEPTED, BONUS, CORRECTED, OWN, REJECTED, Segment

ROUNDS = [
    [Segment("It is", OWN)],
    [Segment(" a [b]list", ACCEPTED), Segment("\nno", REJECTED), Segment(" of", CORRECTED)],
    [Segment(" things.\n\nAnd", ACCEPTED), Segment(" more", BONUS)],
    [Segment(".", CORRECTED)],
]
ANSWER = "It is a [b]list of things.\n\nAnd more."


def growing(answer):
    for segments in ROUNDS:
        answer.segments += segments
        yield answer


def console(width=60, height=20, **options) -> Console:
    return Console(file=StringIO(), width=width, height=height, _environ={}, **options)


def frames(console) -> list[str]:
    """What a terminal showed, drawing by drawing, without colors."""
    plain = re.sub(r"\x1b\[[\d;?]*m", "", console.file.getvalue())
    return re.split(r"(?:\r?\x1b\[2K(?:\x1b\[1A\x1b\[2K)*)", plain)


@pytest.fixture
def answer(answered):
    return answered(21, 1.0, [3, 2, 3, 0], plain=(10, 1.0))


def test_elsewhere_it_is_plain_text(answer):
    screen = Screen(console(), show_rejected=True)
    screen.greet("who")
    screen.echo("what?")
    screen.show(growing(answer))
    measured = "acceptance length 3.00 · 20.0 tokens/s · speedup 2.00 over plain decoding (10.0 tokens/s)"
    assert screen.console.file.getvalue() == f"who\n> what?\n{ANSWER}\n{measured}\n"


def test_a_terminal_shows_colors_and_measures_below(answer):
    screen = Screen(console(120, force_terminal=True, color_system="standard"))
    screen.greet("who")
    screen.show(growing(answer))
    written = screen.console.file.getvalue()
    assert "\x1b[36maccepted draft\x1b[0m" in written and "rejected" not in written
    assert "\x1b[36m a [b]list\x1b[0m\x1b[1;35m of\x1b[0m" in written
    assert "\x1b[3;32m more\x1b[0m" in written
    shown = frames(screen.console)
    assert "It is\nacceptance length" in shown[0]
    assert shown[-1].split("\n")[0] == "And more." and "speedup 2.00" in shown[-1]
    assert sum(each.startswith("It is a [b]list of things.\n") for each in shown) == 1  # complete lines scroll by


def test_a_line_taller_than_the_screen_keeps_the_measures_in_sight(answer):
    screen = Screen(console(30, height=8, force_terminal=True))
    answer.segments.append(Segment("word " * 90, ACCEPTED))
    screen.show([answer])
    shown = frames(screen.console)[-1].splitlines()
    assert len([line for line in shown if line.startswith("word")]) <= 5
    assert "speedup 2.00" in " ".join(shown)


@pytest.mark.parametrize("terminal", [True, False])
def test_an_interrupt_ends_the_line_and_goes_on(answer, terminal):
    def interrupted():
        answer.segments += ROUNDS[0]
        yield answer
        raise KeyboardInterrupt

    screen = Screen(console(force_terminal=terminal))
    with pytest.raises(KeyboardInterrupt):
        screen.show(interrupted())
    written = re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", "", screen.console.file.getvalue())
    assert "It is\n" in written and written.endswith("\n")


def test_a_sum_is_said_of_several_answers(answer):
    screen = Screen(console(200))
    screen.sum_up([answer])
    assert screen.console.file.getvalue() == ""
    screen.sum_up([answer, answer])
    assert screen.console.file.getvalue().startswith("2 drafted answers: acceptance length 3.00")


def colors_of(svg: str) -> dict[str, str]:
    """Each text of a picture and the color that its class gives it."""
    colors = dict(re.findall(r"\.(chat-r\d+) \{ fill: (#\w+)", svg))
    root = ElementTree.fromstring(svg)
    texts = [each for each in root.iter("{http://www.w3.org/2000/svg}text") if each.get("class") in colors]
    return {(each.text or "").replace("\xa0", " "): colors[each.get("class")] for each in texts}


def test_a_recording_has_the_colors_of_its_key(answer, tmp_path):
    assert len(list(growing(answer))) == len(ROUNDS)
    svg = write_svg(tmp_path / "chat.svg", "who", [answer, answer], show_rejected=True).read_text("utf-8")
    colors = colors_of(svg)
    names = {"accepted draft": " a [b]list", "correction": " of", "bonus": " more", "rejected draft": "↵no"}
    assert len({colors[name] for name in names}) == 4
    for name, text in names.items():
        assert colors[name] == colors[text], name
    assert "who" in colors and "> q" in colors and "font-face" not in svg
    assert any(text.startswith("2 drafted answers") for text in colors)
    assert write_svg(tmp_path / "again.svg", "who", [answer, answer], show_rejected=True).read_text("utf-8") == svg
    assert "rejected" not in write_svg(tmp_path / "chat.svg", "who", [answer]).read_text("utf-8")
