"""Drafters that look at nothing but the text, on the host: no weights, no training.

B = requests, n = the most tokens that one of them emitted, N = the longest draft.

What was emitted is read from the device once a round for all requests, and their drafts are written to it once."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from specdraft.decoding.interfaces import Drafting
from specdraft.decoding.passes import Texts
from specdraft.decoding.sampling import Chance, Sampling
from specdraft.decoding.shapes import ForcedPath, Shape
from specdraft.decoding.tree import DraftTrees
from specdraft.drafters.base import Drafter
from specdraft.targets import Features


class TextDrafter(Drafter, ABC):
    """Proposes what follows from tokens alone. Its candidates are chosen, not drawn: q is none, and the verification
    rule accepts each with the probability that the target gives it."""

    reads_text_alone = True

    @abstractmethod
    def start(self, prompt: list[int]) -> Any:
        """The state of a request with this prompt."""

    @abstractmethod
    def extend(self, state: Any, tokens: list[int]) -> None:
        """Append what the target emitted."""

    @abstractmethod
    def propose(self, state: Any, length: int, after: Sequence[int] = ()) -> list[int]:
        """At most ``length`` tokens that may follow the text, and ``after``, if that came next; none if nothing is
        known. ``state`` stays as it was."""

    def drafting(self, rows: int, capacity: int) -> "TextDrafting":
        """See ``Drafter``."""
        return TextDrafting(self, rows)


class TextDrafting(Drafting):
    """Drafts of a ``TextDrafter``: chains, whatever the shape, as deep as it is at most."""

    def __init__(self, drafter: TextDrafter, rows: int) -> None:
        self.drafter = drafter
        self.states: list[Any] = [None] * rows
        self._begun: dict[int, int] = {}  # first tokens of prompts that are not known yet, by row

    def begin(self, row: int, first_token: int) -> None:
        """See ``Drafting``."""
        self._begun[row] = first_token

    def advance(self, texts: Texts, tokens: Tensor, counts: Tensor, features: Features) -> None:
        """See ``Drafting``; the features are not read."""
        told = torch.cat([counts[:, None], tokens], dim=1).tolist()
        for row, (count, *emitted) in enumerate(told, start=texts.first):
            if row in self._begun:
                self.states[row] = self.drafter.start([self._begun.pop(row), *emitted[: count - 1]])
                emitted, count = emitted[count - 1 :], 1
            self.drafter.extend(self.states[row], emitted[:count])

    def draft(self, texts: Texts, shape: Shape | ForcedPath, sampling: Sampling, chance: Chance | None) -> DraftTrees:
        """See ``Drafting``."""
        return chains(self.propose(len(texts.lengths), shape.depth), texts.lengths.device)

    def propose(self, rows: int, length: int) -> list[list[int]]:
        """At most ``length`` tokens for each of the first requests."""
        return [self.drafter.propose(state, length) for state in self.states[:rows]]

    def drop(self, row: int, last: int, length: int) -> None:
        """See ``Drafting``."""
        self.states[row], self.states[last] = self.states[last], None


def chains(drafts: Sequence[Sequence[int]], device: torch.device) -> DraftTrees:
    """Chosen tokens of B requests, which may differ in length, as chains ``[B, N]``."""
    longest = max(map(len, drafts))
    written = [[len(draft), *draft, *[0] * (longest - len(draft))] for draft in drafts]
    table = torch.tensor(written, dtype=torch.int64, device=device)  # [B, 1 + N]
    alive = None
    if any(len(draft) < longest for draft in drafts):
        alive = torch.arange(longest, device=device) < table[:, :1]
    return DraftTrees.chains(table[:, 1:], alive=alive)
