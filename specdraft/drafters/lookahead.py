"""Lookahead decoding: the target guesses ahead in its own passes, and n-grams of guesses are drafts (training-free).

B = requests, N = tokens of an n-gram, W = columns of the window, G = guesses, m = W (N - 1) - 1 tokens that ride along.

Jacobi decoding throws away what it guesses for places that it does not reach. Lookahead decoding (2402.02057) keeps it:
a window of guesses rides along in every pass of the target, and each of its columns is an n-gram that grows by a token
a pass. Finished n-grams go to a pool; those that begin with the last emitted token are verified as a tree, in the same
pass. Guesses are the target's most likely tokens at every temperature, point masses for the verification rule."""

from collections.abc import Sequence

import torch
from torch import Tensor

from specdraft.decoding.compilation import is_active
from specdraft.decoding.interfaces import Drafting
from specdraft.decoding.passes import Riders, Texts
from specdraft.decoding.sampling import Chance, Sampling
from specdraft.decoding.shapes import ForcedPath, Shape
from specdraft.decoding.tree import ROOT, DraftTrees
from specdraft.drafters.base import Drafter, constructor_arguments
from specdraft.drafters.lookahead_window import NgramPool, Window, places, sees
from specdraft.errors import UserError
from specdraft.targets import Features


class Lookahead(Drafter):
    """Drafts a tree of up to ``guesses`` n-grams of the pool, whatever the shape, as deep as it is at most. The window
    has ``window`` columns. ``pool_from_text``: n-grams of the prompt and the answer are in the pool, too.
    ``keep_pool``: one pool for all requests, instead of one for each."""

    def __init__(
        self, window: int = 7, ngram: int = 5, guesses: int = 7, pool_from_text: bool = True, keep_pool: bool = False
    ) -> None:
        """Raises UserError for n-grams of fewer than 3 tokens, and no column or guess."""
        arguments = constructor_arguments(locals())
        super().__init__()
        for name, value, least, why in (
            ("window", window, 1, "column"),
            ("ngram", ngram, 3, "tokens, the last emitted one and two rows of guesses"),
            ("guesses", guesses, 1, "n-gram to verify"),
        ):
            if value < least:
                raise UserError(f"lookahead decoding with {name}={value}: expected at least {least} {why}")
        self._arguments = arguments
        self.window, self.ngram, self.guesses = window, ngram, guesses
        self.pool_from_text, self.keep_pool = pool_from_text, keep_pool
        self.forget()

    def num_places(self, shape: Shape) -> int:
        """See ``Drafter``; the window is read, too."""
        return self.guesses * self.depth(shape) + len(list(places(self.window, self.ngram)))

    def depth(self, shape: Shape) -> int:
        """Of a guess; the last emitted token is the first of its n-gram."""
        return min(shape.depth, self.ngram - 1)

    def forget(self) -> None:
        """Forget the n-grams of earlier requests."""
        self.pool = NgramPool(self.guesses)

    def drafting(self, rows: int, capacity: int) -> "LookaheadDrafting":
        """See ``Drafter``."""
        assert self.target is not None
        return LookaheadDrafting(self, rows, self.target.device)


class _Request:
    """Its window, its pool, and the end of its text."""

    def __init__(self, drafter: Lookahead, text: list[int]) -> None:
        self.drafter = drafter
        self.pool = drafter.pool if drafter.keep_pool else NgramPool(drafter.guesses)
        self.window = Window(text[:-1], text[-1], drafter.window, drafter.ngram)
        self.end: list[int] = []
        self.read(text)

    def read(self, tokens: Sequence[int]) -> None:
        """The text goes on."""
        for token in tokens if self.drafter.pool_from_text else ():
            self.end = [*self.end, token][-self.drafter.ngram :]
            if len(self.end) == self.drafter.ngram:
                self.pool.add(self.end)

    def move(self, said: list[int], emitted: Sequence[int]) -> None:
        """What the target said after the window, and what it emitted."""
        for ngram in self.window.move(said, emitted):
            self.pool.add(ngram)
        self.read(emitted)

    def guesses(self) -> list[tuple[int, ...]]:
        """What may follow the last emitted token."""
        return self.pool.after(self.window.rows[0][0])


class LookaheadDrafting(Drafting):
    """What is kept of each request, on the host, and how every window is read."""

    def __init__(self, drafter: Lookahead, rows: int, device: torch.device) -> None:
        self.drafter = drafter
        self.states: list[_Request | None] = [None] * rows
        self.places = list(places(drafter.window, drafter.ngram))
        self.offsets = torch.tensor([sum(place) for place in self.places], device=device)  # [m]
        seen = [[sees(one, other) for other in self.places] for one in self.places]
        self.seen = torch.tensor(seen, device=device)  # [m, m]
        self._said = torch.empty((0, drafter.window), dtype=torch.int64, device=device)  # after the newest rows, [B, W]
        self._begun: dict[int, int] = {}  # first tokens of prompts that are not known yet, by row

    def begin(self, row: int, first_token: int) -> None:
        """See ``Drafting``."""
        self._begun[row] = first_token

    def num_read(self, shape: Shape) -> int:
        """See ``Drafting``."""
        return self.drafter.num_places(shape)

    def _requests(self, rows: int) -> list[_Request]:
        return [state for state in self.states[:rows] if state is not None]

    def draft(self, texts: Texts, shape: Shape | ForcedPath, sampling: Sampling, chance: Chance | None) -> DraftTrees:
        """See ``Drafting``. Raises UserError where a tree is to be measured: every pass changes the pool."""
        if isinstance(shape, ForcedPath):
            mend = "decoding/shape=chain, of which it takes the depth"
            raise UserError(f"a tree cannot be measured for lookahead, which learns as it decodes: expected {mend}")
        depth = self.drafter.depth(shape)
        found = [merged(state.guesses(), depth) for state in self._requests(len(texts.lengths))]
        # Each width of a pass is compiled by itself: then every draft is as wide as the widest.
        nodes = self.drafter.guesses * depth if is_active() else max(1, *(len(tokens) for tokens, _ in found))
        table = []
        for tokens, parents in found:
            missing = nodes - len(tokens)
            table.append([*tokens, *[0] * missing, *parents, *[ROOT] * missing, len(tokens)])
        told = torch.tensor(table, dtype=torch.int64, device=texts.lengths.device)  # [B, 2 nodes + 1]
        alive = torch.arange(nodes, device=told.device) < told[:, -1:]
        width = self.drafter.guesses
        return DraftTrees(told[:, :nodes], told[:, nodes:-1], None, alive, depth=depth, width=width)

    def ride(self, texts: Texts) -> Riders:
        """See ``Drafting``."""
        windows = [state.window.rows for state in self._requests(len(texts.lengths))]
        read = [[window[row][column] for row, column in self.places] for window in windows]
        tokens = torch.tensor(read, dtype=torch.int64, device=self.offsets.device)  # [B, m]
        count = len(read)
        return Riders(tokens, self.offsets.expand(count, -1), self.seen.expand(count, -1, -1), self.drafter.window)

    def hear(self, logits: Tensor) -> None:
        """See ``Drafting``."""
        self._said = logits.argmax(-1)

    def advance(self, texts: Texts, tokens: Tensor, counts: Tensor, features: Features) -> None:
        """See ``Drafting``; the features are not read."""
        if texts.first in self._begun:
            text = [self._begun.pop(texts.first), *tokens[0].tolist()]
            self.states[texts.first] = _Request(self.drafter, text)
            return
        width = self.drafter.window
        told = torch.cat([self._said, counts[:, None], tokens], dim=1).tolist()
        for state, read in zip(self._requests(len(told)), told, strict=True):
            state.move(read[:width], read[width + 1 :][: read[width]])

    def drop(self, row: int, last: int, length: int) -> None:
        """See ``Drafting``."""
        self.states[row], self.states[last] = self.states[last], None


def merged(guesses: Sequence[tuple[int, ...]], depth: int) -> tuple[list[int], list[int]]:
    """Tokens and parents of the tree of the guesses, of each ``depth`` tokens: those that begin alike share nodes."""
    nodes: dict[tuple[int, ...], int] = {}
    for guess in guesses:
        for end in range(1, min(depth, len(guess)) + 1):
            nodes.setdefault(guess[:end], len(nodes))
    return [path[-1] for path in nodes], [nodes.get(path[:-1], ROOT) for path in nodes]
