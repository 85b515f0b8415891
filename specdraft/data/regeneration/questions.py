"""Which questions that the target wrote itself are worth an answer."""

import re

_WORD = re.compile(r"\w+")
_LONGEST_WORD = 40  # characters; longer ones are noise, addresses and encoded data
_RUN = 3  # words
_DISTINCT = 0.7  # share of runs of words that occur once


def normalized(text: str) -> str:
    """The text without case, punctuation and blanks: equal for questions that say the same in the same words."""
    return " ".join(_WORD.findall(text.lower()))


def flaw(question: str) -> str:
    """Why a question is not asked, empty if it may be: too short, characters that are none, or it repeats itself."""
    words = _WORD.findall(question.lower())
    if len(words) < 2:
        return "fewer than two words"
    if "\ufffd" in question or max(map(len, words)) > _LONGEST_WORD:
        return "unreadable"
    runs = [tuple(words[start : start + _RUN]) for start in range(len(words) - _RUN + 1)]
    if runs and len(set(runs)) < _DISTINCT * len(runs):
        return "repeats itself"
    return ""
