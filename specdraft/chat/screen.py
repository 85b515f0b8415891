"""A chat as it is seen: on a terminal every token when it is decoded, elsewhere plain text line by line."""

import re
from collections.abc import Iterable, Iterator, Sequence
from io import StringIO
from pathlib import Path

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from specdraft.chat.conversation import Answer
from specdraft.chat.speed import Speed
from specdraft.chat.view import answer_text, key, printable, status_line, summary
from specdraft.files import write_text

PROMPT = "> "
_RECORDED_COLUMNS = 100
_QUESTION, _MEASURED = "bold", "dim"


class Screen:
    """Writes to a console, which knows whether it is a terminal."""

    def __init__(self, console: Console, show_rejected: bool = False) -> None:
        self.console, self.show_rejected = console, show_rejected

    def say(self, text: str) -> None:
        """A line of ours."""
        self.console.print(Text(printable(text), _MEASURED), soft_wrap=True)

    def greet(self, about: str) -> None:
        """What is being talked to, and the key to the colors where there are any."""
        self.say(about)
        if self.console.is_terminal:
            self.console.print(key(self.show_rejected))

    def echo(self, question: str) -> None:
        """A question that nobody typed here."""
        self.console.print(Text(f"{PROMPT}{printable(question)}", _QUESTION), soft_wrap=True)

    def sum_up(self, answers: Sequence[Answer]) -> None:
        """What was measured over all of them."""
        if said := summary(answers):
            self.say(said)

    def show(self, answers: Iterable[Answer]) -> None:
        """Show an answer while it grows, and below it what was measured. Its line ends even if it is interrupted."""
        if self.console.is_terminal:
            self._live(_growing(answers, self.show_rejected))
        else:
            self._plain(_growing(answers, show_rejected=False))  # which only their color would tell from the answer

    def _live(self, growing: Iterable[tuple[Answer, Text]]) -> None:
        """Lines that are complete scroll by; the one under way and the measurements below it are drawn anew."""
        line = Text()
        with Live(console=self.console, auto_refresh=False) as live:
            for answer, new in growing:
                *lines, line = line.append_text(new).split("\n", allow_blank=True)
                for complete in lines:
                    self.console.print(complete)
                below = Text(status_line(Speed.of([answer])), _MEASURED).wrap(self.console, self.console.width)
                rows = line.wrap(self.console, self.console.width)
                room = max(1, self.console.height - len(below) - 1)  # what is taller than the screen cannot be redrawn
                live.update(Group(*rows[-room:], *below), refresh=True)

    def _plain(self, growing: Iterable[tuple[Answer, Text]]) -> None:
        measured = ""
        try:
            for answer, new in growing:
                self.console.out(new.plain, end="", highlight=False)
                measured = status_line(Speed.of([answer]))
        finally:
            self.console.out()
        self.say(measured)


def _growing(answers: Iterable[Answer], show_rejected: bool) -> Iterator[tuple[Answer, Text]]:
    """Each time the answer, and the text that it has not had before."""
    shown = 0
    for answer in answers:
        yield answer, answer_text(answer.segments[shown:], show_rejected)
        shown = len(answer.segments)


def write_svg(path: Path, about: str, answers: Sequence[Answer], show_rejected: bool = False) -> Path:
    """Draw a finished chat with its colors and the key to them. The file is whole or absent, and loads nothing."""
    console = Console(record=True, file=StringIO(), width=_RECORDED_COLUMNS, force_terminal=True, legacy_windows=False)
    console.print(Text(printable(about), _MEASURED))
    for answer in answers:
        console.print(Text(f"\n{PROMPT}{printable(answer.question)}", _QUESTION))
        console.print(answer_text(answer.segments, show_rejected))
        console.print(Text(status_line(Speed.of([answer])), _MEASURED))
    if said := summary(answers):
        console.print(Text(f"\n{said}", _MEASURED))
    console.print(Text("\n").append_text(key(show_rejected)))
    drawn = console.export_svg(title="specdraft chat", unique_id="chat")
    return write_text(path, re.sub(r"@font-face \{.*?\}\s*", "", drawn, flags=re.DOTALL))  # which the network has
