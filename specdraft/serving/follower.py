"""Drafting for the requests of an engine that says nothing of them but what their texts are.

B = requests drafted for, n = the most tokens that one of them was given in a step.

An engine keeps requests in rows and moves them as others come and go, without telling whose row is whose. A request
that goes on is known by its text: what a row held before this step's tokens is what the request held after the last
one. Requests of equal texts are in equal states, so that it does not matter which is taken for which. What is not found
again is dropped, and what is not known begins."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specdraft.decoding.pace import Pace
from specdraft.decoding.pacing import Rounds
from specdraft.decoding.passes import Texts
from specdraft.decoding.sampling import Sampling
from specdraft.decoding.shapes import StaticTree
from specdraft.drafters.base import Drafter
from specdraft.targets import Features

Ids = NDArray[np.integer[Any]]


class Follower:
    """What a drafter that reads the text alone keeps of the requests under way, and its drafts for them."""

    def __init__(self, drafter: Drafter, shape: StaticTree, rows: int, limit: int, device: torch.device) -> None:
        """shape: of every draft, a chain of chosen tokens. rows: requests that the engine decodes side by side.
        limit: tokens of its context."""
        assert shape.is_chain and not shape.sampled
        self.shape, self.limit, self.device, self.pace = shape, limit, device, Pace.of(shape, drafter)
        self.drafting = drafter.drafting(rows, limit + 1 + shape.num_places)
        self.texts: list[Ids] = []  # by row of ``drafting``, with all that it was told
        self.rounds: list[Rounds] = []  # of each, as far as the engine says of them
        self.drafted: list[tuple[int, list[float]]] = []  # tokens for each in the last step, and how sure of them

    @torch.inference_mode()
    def drafts(self, texts: Sequence[Ids], emitted: Sequence[int]) -> list[list[int]]:
        """Drafts by the engine's rows. texts: all tokens of each. emitted: how many of them are new, at the end; 0: of
        a prompt that is not read to its end, for which nothing is drafted."""
        rows = self._found_again(texts, emitted)
        for rounds, (drafted, sure), row in zip(self.rounds, self.drafted, rows, strict=True):
            if row is not None:  # one of the emitted tokens is the target's own
                rounds.note(drafted, min(emitted[row] - 1, drafted), sure)
        for place in reversed(range(len(rows))):
            if rows[place] is None:
                self._drop(place)
                rows[place] = rows[-1]
                rows.pop()
        going = [row for row in rows if row is not None]
        if going:
            self._advance([texts[row] for row in going], [emitted[row] for row in going], 0)
        for row, (text, count) in enumerate(zip(texts, emitted, strict=True)):
            if count and row not in going:
                self.drafting.begin(len(going), int(text[0]))
                self._advance([text], [len(text) - 1], len(going))
                self.rounds.append(Rounds())
                going.append(row)
        self.texts = [texts[row].copy() for row in going]
        found: list[list[int]] = [[] for _ in texts]
        for row, draft in zip(going, self._draft(), strict=True):
            found[row] = draft
        counts = [len(found[row]) for row in going]
        pace = self.pace
        self.drafted = [(n, [] if pace is None else pace.sure(place, n)) for place, n in enumerate(counts)]
        return found

    def _found_again(self, texts: Sequence[Ids], emitted: Sequence[int]) -> list[int | None]:
        """For each request that is known the engine's row that goes on with it, if any."""
        known = defaultdict(list)  # by length, which tells most of them apart
        for place, text in enumerate(self.texts):
            known[len(text)].append(place)
        rows: list[int | None] = [None] * len(self.texts)
        for row, (text, count) in enumerate(zip(texts, emitted, strict=True)):
            before = text[: len(text) - count]
            alike = (place for place in known[len(before)] if np.array_equal(self.texts[place], before))
            if count and (found := next(alike, None)) is not None:
                known[len(before)].remove(found)
                rows[found] = row
        return rows

    def _drop(self, place: int) -> None:
        last = len(self.texts) - 1
        self.drafting.drop(place, last, len(self.texts[last]))
        self.texts[place], self.rounds[place] = self.texts[last], self.rounds[last]
        self.texts.pop()
        self.rounds.pop()

    def _advance(self, texts: Sequence[Ids], counts: Sequence[int], first: int) -> None:
        """Tell the drafter the last ``counts`` tokens of texts that lie in its rows from ``first`` on."""
        tokens = np.zeros((len(texts), max(counts)), dtype=np.int64)  # [B, n]
        for row, (text, count) in enumerate(zip(texts, counts, strict=True)):
            tokens[row, :count] = text[len(text) - count :]
        before = [len(text) - count for text, count in zip(texts, counts, strict=True)]
        nothing = torch.empty((*tokens.shape, 0), device=self.device)
        told = Texts(self._tensor(before), max(before), first)
        self.drafting.advance(told, self._tensor(tokens), self._tensor(counts), Features(nothing, nothing))

    def _draft(self) -> list[list[int]]:
        lengths = [len(text) for text in self.texts]
        room = self.limit - min(lengths, default=self.limit)
        shape = None
        if room > 0:
            shape = self.shape.truncate(room) if self.pace is None else self.pace.shape(self.rounds, room)
        if shape is None:
            return [[] for _ in lengths]
        texts = Texts(self._tensor(lengths), max(lengths))
        trees = self.drafting.draft(texts, shape, Sampling(), None)
        trees = trees.truncate(self.limit - texts.lengths)
        alive = trees.beneath(torch.ones_like(trees.tokens, dtype=torch.bool)).sum(-1)  # [B]
        told = torch.cat([alive[:, None], trees.tokens], dim=1).tolist()
        return [draft[:count] for count, *draft in told]

    def _tensor(self, values: Sequence[int] | NDArray[np.int64]) -> Tensor:
        return torch.as_tensor(values, dtype=torch.int64, device=self.device)
