"""Conversations that overlap with a benchmark are kept out of training.

A conversation overlaps if one of its turns is a benchmark's question, or shares 13 successive words with one (the
measure of GPT-3, arXiv 2005.14165, appendix C); case, punctuation and blanks are ignored."""

import re
from collections.abc import Iterable, Iterator

from specdraft.data.sources.base import Conversation

_WORD = re.compile(r"\w+")
_RUN = 13


class Benchmark:
    """The questions of a benchmark, for comparison."""

    def __init__(self, questions: Iterable[str]) -> None:
        """Keep each question's words and its runs of 13 words."""
        words = [_words(question) for question in questions]
        self.questions = {tuple(question) for question in words if question}
        self.runs = {run for question in words for run in _runs(question)}

    def overlaps(self, conversation: Conversation) -> bool:
        """Whether a turn of the conversation, or the document, holds what the benchmark asks."""
        return self.holds([message["content"] for message in conversation.messages] or [conversation.response or ""])

    def holds(self, texts: Iterable[str]) -> bool:
        """Whether one of the texts holds what the benchmark asks."""
        return any(
            tuple(words) in self.questions or any(run in self.runs for run in _runs(words))
            for words in map(_words, texts if self.questions else ())
        )


def _words(text: str) -> list[str]:
    return _WORD.findall(text.lower())


def _runs(words: list[str]) -> Iterator[tuple[str, ...]]:
    return (tuple(words[start : start + _RUN]) for start in range(len(words) - _RUN + 1))
