"""Prompt lookup: draft what followed the last few tokens where they occurred before (training-free).

The text so far is its own draft model: code and quotations repeat themselves. The longest n-gram that ends the text
and occurred earlier decides, at its most recent occurrence.

Occurrences are indexed as tokens arrive: a draft costs a few dictionary look-ups, whatever the length of the text."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from specdraft.drafters.base import constructor_arguments
from specdraft.drafters.text_drafter import TextDrafter
from specdraft.errors import UserError


@dataclass
class PromptLookupState:
    """The text of one request. ``continuations`` maps an n-gram to where the text went on after it the last time."""

    tokens: list[int]
    continuations: dict[tuple[int, ...], int] = field(default_factory=dict)


class PromptLookup(TextDrafter):
    """Look up n-grams of ``max_ngram`` down to ``min_ngram`` tokens; without a match nothing is drafted."""

    def __init__(self, max_ngram: int = 3, min_ngram: int = 1) -> None:
        """Raises UserError unless 1 <= min_ngram <= max_ngram."""
        arguments = constructor_arguments(locals())
        super().__init__()
        if not 1 <= min_ngram <= max_ngram:
            given = f"min_ngram={min_ngram} and max_ngram={max_ngram}"
            raise UserError(f"prompt lookup with {given}: expected 1 <= min_ngram <= max_ngram")
        self._arguments = arguments
        self.max_ngram, self.min_ngram = max_ngram, min_ngram

    def start(self, prompt: list[int]) -> PromptLookupState:
        """The prompt's n-grams."""
        state = PromptLookupState([])
        self.extend(state, prompt)
        return state

    def extend(self, state: PromptLookupState, tokens: list[int]) -> None:
        """Append the tokens, and note what now has a continuation."""
        for token in tokens:
            # The n-grams that end the text have a continuation only now, so a look-up never finds the text's own end.
            for size in range(self.min_ngram, min(self.max_ngram, len(state.tokens)) + 1):
                state.continuations[tuple(state.tokens[-size:])] = len(state.tokens)
            state.tokens.append(token)

    def propose(self, state: PromptLookupState, length: int, after: Sequence[int] = ()) -> list[int]:
        """What followed: fewer tokens near the end of the text, none without a match."""
        end = [*state.tokens[-self.max_ngram :], *after]
        for size in range(min(self.max_ngram, len(end)), self.min_ngram - 1, -1):
            start = state.continuations.get(tuple(end[-size:]))
            if start is not None:
                return [*state.tokens[start : start + length], *after][:length]
        return []
