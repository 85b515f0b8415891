"""Prompt lookup: draft what followed the last few tokens where they occurred before (training-free).

The text so far is its own draft model: code and quotations repeat themselves. The longest n-gram that ends the text
and occurred earlier decides, at its most recent occurrence. Candidates are deterministic, so q is none and the
verification rule accepts each with probability p.

Occurrences are indexed as tokens arrive: a draft costs a few dictionary look-ups, whatever the length of the text."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from specdraft.decoding.sampling import Chance, Sampling
from specdraft.decoding.shapes import ForcedPath, Shape
from specdraft.decoding.tree import DraftTrees
from specdraft.drafters.base import constructor_arguments
from specdraft.drafters.drafting import SingleDrafter
from specdraft.errors import UserError
from specdraft.targets import Features


@dataclass
class PromptLookupState:
    """The text of one request. ``continuations`` maps an n-gram to where the text went on after it the last time."""

    tokens: list[int]
    continuations: dict[tuple[int, ...], int] = field(default_factory=dict)


class PromptLookup(SingleDrafter):
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

    def start(self, first_token: int, max_length: int) -> PromptLookupState:
        """A text of one token."""
        return PromptLookupState([first_token])

    def advance(self, state: PromptLookupState, tokens: Tensor, features: Features) -> None:
        """Append the tokens ``[n]``; the features are not read."""
        for token in tokens.tolist():
            # The n-grams that end the text have a continuation only now, so a look-up never finds the text's own end.
            for size in range(self.min_ngram, min(self.max_ngram, len(state.tokens)) + 1):
                state.continuations[tuple(state.tokens[-size:])] = len(state.tokens)
            state.tokens.append(token)

    def draft(
        self, state: PromptLookupState, shape: Shape | ForcedPath, sampling: Sampling, chance: Chance | None
    ) -> DraftTrees:
        """A chain as deep as the shape at most: shorter near the end of the text, empty without a match."""
        found: list[int] = []
        for size in range(min(self.max_ngram, len(state.tokens)), self.min_ngram - 1, -1):
            start = state.continuations.get(tuple(state.tokens[-size:]))
            if start is not None:
                found = state.tokens[start : start + shape.depth]
                break
        device = None if self.target is None else self.target.device
        return DraftTrees.chains(torch.tensor([found], dtype=torch.int64, device=device))
