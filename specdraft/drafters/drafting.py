"""Drafting for requests side by side: level by level in shared passes, or for one request after the other.

B = requests, n = the most tokens that one of them emitted, m = nodes of a level, Vd = draft vocabulary."""

from abc import ABC, abstractmethod
from functools import partial
from typing import Any

import torch
from torch import Tensor

from specdraft.decoding.cache import StaticCache
from specdraft.decoding.grammar import Followed
from specdraft.decoding.interfaces import Drafting
from specdraft.decoding.passes import Pass, Texts
from specdraft.decoding.sampling import Chance, Sampling
from specdraft.decoding.shapes import ForcedPath, Shape
from specdraft.decoding.tree import DraftTrees
from specdraft.drafters.base import Drafter
from specdraft.drafters.constrained import Constrained
from specdraft.drafters.draft_tree_builder import Extend, Level, Vocabulary, grow
from specdraft.targets import Features, LanguageModel


class LevelDrafting(Drafting):
    """Drafts that grow level by level, for all requests in one pass each."""

    vocabulary: Vocabulary
    grammar: Followed | None = None

    def constrain(self, grammar: Followed) -> None:
        """See ``Drafting``."""
        self.grammar = grammar

    @abstractmethod
    def first(self, texts: Texts) -> Tensor:
        """Logits ``[B, Vd]`` after the last emitted tokens."""

    @abstractmethod
    def extend(self, texts: Texts, level: Level) -> Tensor:
        """Read a level; logits ``[B, m, Vd]`` after each of its nodes."""

    @torch.inference_mode()
    def draft(self, texts: Texts, shape: Shape | ForcedPath, sampling: Sampling, chance: Chance | None) -> DraftTrees:
        """See ``Drafting``."""
        logits = self.first(texts)
        extend: Extend = partial(self.extend, texts)
        if self.grammar is not None:
            constrained = Constrained(self.grammar, texts.first, self.vocabulary, extend)
            logits, extend = constrained.start(logits), constrained.extend
        return grow(logits, extend, shape, sampling, chance, self.vocabulary)


class ModelDrafting(LevelDrafting):
    """Drafts by a causal LM and a cache, which holds what ``model`` has read of each request."""

    model: LanguageModel
    cache: StaticCache

    unread: Tensor | None = None
    """The last emitted tokens ``[rows]``, if they are read when a draft begins; None: ``first`` takes no pass."""

    def read(self, texts: Texts, tokens: Tensor) -> Tensor:
        """Read ``tokens [B, n]`` that follow ``texts``, one after the other; logits ``[B, n, V]`` after each."""
        reading = Pass.text(tokens, texts.lengths, texts.longest, simple=len(tokens) == 1)
        return self.model.logits(self.model.step(reading, self.cache).last)

    def extend(self, texts: Texts, level: Level) -> Tensor:
        """See ``LevelDrafting``."""
        positions = (texts.lengths + (level.depth - 1))[:, None].expand_as(level.tokens)
        reading = Pass.level(level.tokens, positions, texts.lengths, texts.longest, level.seen, level.before)
        return self.model.logits(self.model.step(reading, self.cache).last)


class SingleDrafter(Drafter, ABC):
    """A drafter that knows of one request alone: ``start`` makes its state; after every pass of the target ``advance``
    hands over the tokens that were emitted and the features of the positions before them; ``draft`` proposes what comes
    next. Requests that are decoded side by side are drafted for one after the other."""

    @abstractmethod
    def start(self, first_token: int, max_length: int) -> Any:
        """The state of a request whose prompt begins with ``first_token``, with room for ``max_length`` tokens."""

    @abstractmethod
    def advance(self, state: Any, tokens: Tensor, features: Features) -> None:
        """Take in n emitted tokens ``[n]``; ``features [1, n, ...]`` at j are of the position *before* ``tokens[j]``.
        The first call brings the prompt from its second token on, and the first token that the target emitted."""

    @abstractmethod
    def draft(self, state: Any, shape: Shape | ForcedPath, sampling: Sampling, chance: Chance | None) -> DraftTrees:
        """Propose what follows the last emitted token, in this ``shape`` or a part of it; ``state`` stays as it was.
        ``sampling`` shapes the q of sampled drafts; ``draft_tree_builder.grow`` makes any shape. B is 1."""

    def drafting(self, rows: int, capacity: int) -> "OneByOne":
        """See ``Drafter``."""
        return OneByOne(self, rows, capacity)


class OneByOne(Drafting):
    """Drafts of a ``SingleDrafter``."""

    def __init__(self, drafter: SingleDrafter, rows: int, capacity: int) -> None:
        self.drafter, self.capacity = drafter, capacity
        self.states: list[Any] = [None] * rows

    def begin(self, row: int, first_token: int) -> None:
        """See ``Drafting``."""
        self.states[row] = self.drafter.start(first_token, self.capacity)

    def advance(self, texts: Texts, tokens: Tensor, counts: Tensor, features: Features) -> None:
        """See ``Drafting``."""
        for index, count in enumerate(counts.tolist()):
            part = Features(*(each[index : index + 1, :count] for each in features))
            self.drafter.advance(self.states[texts.first + index], tokens[index, :count], part)

    def draft(self, texts: Texts, shape: Shape | ForcedPath, sampling: Sampling, chance: Chance | None) -> DraftTrees:
        """See ``Drafting``."""
        trees = []
        for row in range(len(texts.lengths)):
            alone = ForcedPath(shape.tokens[row : row + 1], shape.top_k) if isinstance(shape, ForcedPath) else shape
            own = None if chance is None else chance.of(row)
            trees.append(self.drafter.draft(self.states[row], alone, sampling, own))
        return DraftTrees.join(trees)

    def drop(self, row: int, last: int, length: int) -> None:
        """See ``Drafting``."""
        self.states[row], self.states[last] = self.states[last], None
