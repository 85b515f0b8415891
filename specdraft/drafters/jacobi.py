"""Jacobi decoding: the target's guesses for all coming places are drafted and corrected at once (training-free).

B = requests, n = tokens of a pass, K = drafted tokens.

Every pass says what the target would have next after each guess that it reads, right or wrong: the guesses for the next
pass (2305.10427). One that did not change is what the target would have said, and is accepted. At temperature 0 this is
Jacobi's iteration; above it guesses are still the most likely tokens, point masses for the verification rule."""

import torch
from torch import Tensor

from specdraft.decoding.interfaces import Drafting
from specdraft.decoding.passes import Texts
from specdraft.decoding.sampling import Chance, Sampling
from specdraft.decoding.shapes import ForcedPath, Shape
from specdraft.decoding.tree import DraftTrees
from specdraft.drafters.base import Drafter
from specdraft.targets import Features


class Jacobi(Drafter):
    """Drafts chains of guesses, whatever the shape, as deep as it is."""

    def drafting(self, rows: int, capacity: int) -> "JacobiDrafting":
        """See ``Drafter``."""
        assert self.target is not None
        return JacobiDrafting(rows, self.target.device)


class JacobiDrafting(Drafting):
    """The last emitted token of each request ``[rows]``, and guesses ``[rows, n]`` of what follows it, of which there
    are ``counts [rows]``. Where no pass has told of a place, the last token is guessed again."""

    top_tokens = 1

    def __init__(self, rows: int, device: torch.device) -> None:
        self.last, self.counts = torch.zeros((2, rows), dtype=torch.int64, device=device)
        self.guesses = torch.zeros((rows, 0), dtype=torch.int64, device=device)
        self._told = self.guesses  # what the target would say after each token of the last pass, [B, n]
        self._begun: set[int] = set()  # rows whose prompt is not known yet

    def begin(self, row: int, first_token: int) -> None:
        """See ``Drafting``."""
        self._begun.add(row)

    def observe(self, tokens: Tensor, best: Tensor) -> None:
        """See ``Drafting``."""
        self._told = best[..., 0]

    def advance(self, texts: Texts, tokens: Tensor, counts: Tensor, features: Features) -> None:
        """See ``Drafting``. The guesses behind what was accepted, and behind the token that was emitted instead."""
        here = slice(texts.first, texts.first + len(tokens))
        self.last[here] = tokens.gather(1, counts[:, None] - 1)[:, 0]
        if texts.first in self._begun:  # a prompt's pass tells of the prompt
            self._begun.remove(texts.first)
            self.counts[here] = 0
            return
        places = counts[:, None] + torch.arange(self._told.shape[1], device=counts.device)
        self.guesses = self.guesses.new_zeros((len(self.last), places.shape[1]))
        self.guesses[here] = self._told.gather(1, places.clamp(max=places.shape[1] - 1))
        self.counts[here] = (places.shape[1] - counts).clamp(min=0)

    def draft(self, texts: Texts, shape: Shape | ForcedPath, sampling: Sampling, chance: Chance | None) -> DraftTrees:
        """See ``Drafting``."""
        rows = len(texts.lengths)
        missing = max(0, shape.depth - self.guesses.shape[1])
        guesses = torch.nn.functional.pad(self.guesses[:rows], (0, missing))[:, : shape.depth]
        known = torch.arange(shape.depth, device=guesses.device) < self.counts[:rows, None]
        return DraftTrees.chains(torch.where(known, guesses, self.last[:rows, None]))

    def drop(self, row: int, last: int, length: int) -> None:
        """See ``Drafting``."""
        for kept in (self.last, self.counts, self.guesses):
            kept[row] = kept[last]
