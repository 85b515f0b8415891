"""Questions from every place, and what lines with a slash do."""

import builtins
import io

import pytest
from rich.console import Console

from specdraft.chat.loop import is_typed, read_questions, talk
from specdraft.chat.screen import Screen
from specdraft.errors import UserError


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def screen():
    return Screen(Console(file=io.StringIO(), width=200, _environ={}))


def said(screen) -> str:
    return screen.console.file.getvalue()


def test_questions_are_given_typed_or_piped(monkeypatch):
    assert list(read_questions(["a", " ", "b"], Terminal())) == ["a", "b"] and not is_typed(["a"], Terminal())
    assert list(read_questions([], io.StringIO("a\r\n\n b\n"))) == ["a", " b"] and not is_typed([], io.StringIO())
    for end in (EOFError, KeyboardInterrupt):
        typed = iter(["a", "", "b"])

        def answer(prompt, typed=typed, end=end):
            assert prompt == "> "
            for line in typed:
                return line
            raise end

        monkeypatch.setattr(builtins, "input", answer)
        assert list(read_questions([], Terminal())) == ["a", "b"] and is_typed([], Terminal())


@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])  # the latter without a locale, as in containers
def test_input_that_is_no_text(errors):
    with pytest.raises(UserError, match="standard input is not text"):
        list(read_questions([], io.TextIOWrapper(io.BytesIO(b"a\n\xff\xfe\n"), "utf-8", errors)))


def test_new_begins_again_and_quit_ends(conversation, screen):
    chat = conversation()
    talk(chat, screen, ["one", "/new", "one", "/quit", "two"], typed=False)
    first, second = chat.answers
    assert first.generation.tokens == second.generation.tokens and len(chat.messages) == 2
    assert first.segments == second.segments
    assert "> one\n" in said(screen) and "a new conversation" in said(screen) and "two" not in said(screen)


def test_the_drafter_is_switched(conversation, screen):
    chat = conversation()
    talk(chat, screen, ["one", "/drafter off", "one", "/drafter on", "one", "/help"], typed=False)
    assert [answer.drafted for answer in chat.answers] == [True, False, True]
    assert "the drafter is off" in said(screen) and "tokens/s, plain decoding" in said(screen)
    assert "Ctrl-D" in said(screen)


@pytest.mark.parametrize("line", ["/nwe", "/drafter", "/drafter maybe", "/"])
def test_an_unknown_word_is_one_sentence(conversation, screen, line):
    with pytest.raises(UserError, match="is no command here: expected /new forgets"):
        talk(conversation(), screen, [line], typed=False)
    chat = conversation()
    talk(chat, screen, [line, f" {line}"], typed=True)  # who is there reads it and goes on
    assert f"error: {line.split()[0]} is no command here" in said(screen)
    assert [answer.question for answer in chat.answers] == [f" {line}"]


def test_there_may_be_no_drafter(conversation, screen):
    chat = conversation()
    chat.drafter = None
    with pytest.raises(UserError, match="there is no drafter to switch"):
        talk(chat, screen, ["/drafter on"], typed=False)


def test_ctrl_c_stops_an_answer_of_who_is_there(conversation, screen, monkeypatch):
    show, asked = screen.show, []

    def stopping(answers):
        asked.append(1)
        if len(asked) == 1:
            next(answers)
            raise KeyboardInterrupt
        show(answers)

    monkeypatch.setattr(screen, "show", stopping)
    chat = conversation()
    talk(chat, screen, ["one", "two"], typed=True)
    assert [len(answer.generation.tokens) for answer in chat.answers] == [1, 24]
    assert len(chat.messages) == 4 and "stopped" in said(screen)
    asked.clear()
    with pytest.raises(KeyboardInterrupt):
        talk(conversation(), screen, ["one"], typed=False)
