"""The talk itself: questions from the configuration, the terminal or a pipe, and words that begin with a slash."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, suppress
from io import TextIOWrapper
from typing import TextIO

from specdraft.chat.conversation import Conversation
from specdraft.chat.screen import PROMPT, Screen
from specdraft.errors import UserError

HELP = (
    "/new forgets the conversation, /drafter off and /drafter on switch drafting, /quit ends; so do Ctrl-C and Ctrl-D"
)


def is_typed(given: Sequence[str], stdin: TextIO) -> bool:
    """Whether a person types the questions."""
    return not given and stdin.isatty()


def read_questions(given: Sequence[str], stdin: TextIO) -> Iterator[str]:
    """The lines of a chat: those that were given, else those that are typed, else those of ``stdin``, without empty
    ones. Raises UserError for input that is no text."""
    lines = iter(given) if given else _typed() if stdin.isatty() else _piped(stdin)
    return (line for line in lines if line.strip())


def _typed() -> Iterator[str]:
    with suppress(ImportError):  # editing and a history of lines, where Python has it
        import readline  # noqa: F401
    while True:
        try:
            line = input(PROMPT)
        except (EOFError, KeyboardInterrupt):
            print()
            return
        yield line


def _piped(stdin: TextIO) -> Iterator[str]:
    try:
        if isinstance(stdin, TextIOWrapper):  # without a locale Python makes surrogates of what is no text
            stdin.reconfigure(errors="strict")
        for line in stdin:
            yield line.rstrip("\r\n")
    except UnicodeDecodeError as error:
        raise UserError(f"standard input is not text ({error.reason}): expected a question a line, in UTF-8") from error


def talk(conversation: Conversation, screen: Screen, questions: Iterable[str], typed: bool) -> None:
    """Answer one question after the other. ``typed``: a person is there, who sees what is wrong with a question and
    asks another, and whose Ctrl-C ends an answer. Otherwise questions are shown, and what is wrong ends the chat:
    raises UserError."""
    for line in questions:
        if not typed:
            screen.echo(line)
        if line.split() == ["/quit"]:
            return
        try:
            if line.startswith("/"):
                screen.say(_obey(line, conversation))
                continue
            with closing(conversation.ask(line)) as answer:
                screen.show(answer)
        except UserError as error:
            if not typed:
                raise
            screen.say(f"error: {error}")
        except KeyboardInterrupt:
            if not typed:
                raise
            screen.say("stopped")


def _obey(line: str, conversation: Conversation) -> str:
    """Do what a line with a slash says; gives what is to be said about it."""
    match line.split():
        case ["/new"]:
            conversation.reset()
            return "a new conversation"
        case ["/drafter", ("on" | "off") as switch]:
            if conversation.drafter is None:
                raise UserError("there is no drafter to switch: expected checkpoint=PATH when the chat begins")
            conversation.drafting = switch == "on"
            return f"the drafter is {switch}"
        case ["/help"]:
            return HELP
    raise UserError(f"{line.split()[0]} is no command here: expected {HELP}; a space before it makes it a question")
