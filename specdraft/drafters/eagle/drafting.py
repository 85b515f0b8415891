"""How an EAGLE head drafts: the same forward as in training, its keys in a cache.

B = requests, n = positions that each reads, m = nodes of a level, H = hidden size, Hq / Hk = query / key-value heads,
d = head size, Vd = draft vocabulary."""

# ruff: noqa: D102  (a head's methods are described where they are defined)

from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from specdraft.attention import shared_attention
from specdraft.decoding.cache import StaticCache
from specdraft.decoding.compilation import Compilable
from specdraft.decoding.passes import Pass, Texts
from specdraft.drafters.draft_tree_builder import Level, Vocabulary
from specdraft.drafters.drafting import LevelDrafting
from specdraft.drafters.eagle.forward import Attend, Attends, Output
from specdraft.drafters.rotary import RotaryTable
from specdraft.targets import Features


class Head(Protocol):
    """What an ``EagleHead`` is to its drafting."""

    rotary: RotaryTable
    decoding_pass: Compilable
    num_layers: int
    sliding_window: int | None

    @property
    def vocabulary(self) -> Vocabulary: ...
    def feature(self, features: Features) -> Tensor: ...
    def read(self, tokens: Tensor, feature: Tensor, attends: Attends) -> Output: ...
    def logits(self, hidden: Tensor) -> Tensor: ...


class EagleDrafting(LevelDrafting):
    """The keys and values of all emitted positions of each request, and its output at the last one. The first token
    of a text has no feature before it, so the head never sees it: it holds a position less than the text has tokens."""

    def __init__(self, head: Head, rows: int, capacity: int) -> None:
        self.head, self.vocabulary = head, head.vocabulary
        self.rows, self.cache = rows, StaticCache(head.num_layers, rows, capacity)
        self.outputs: list[Tensor] = []  # [rows, H] and [rows, Vd]
        self._feature = torch.empty(0)  # of the level that was read last, [B, m, H]

    def begin(self, row: int, first_token: int) -> None:
        """See ``Drafting``."""

    def advance(self, texts: Texts, tokens: Tensor, counts: Tensor, features: Features) -> None:
        """Append what was emitted; its keys replace those of what was drafted there."""
        # Of a single layer only the last position is asked, which sees all.
        reading = Pass.text(tokens, texts.lengths - 1, texts.longest - 1, simple=self.head.num_layers == 1)
        output = self._read(reading, self.head.feature(features), texts.first, (counts - 1)[:, None])
        self.outputs = self.outputs or [part.new_zeros(self.rows, part.shape[-1]) for part in output]
        for kept, new in zip(self.outputs, output, strict=True):
            kept[texts.first : texts.first + len(tokens)] = new[:, 0]

    def first(self, texts: Texts) -> Tensor:
        """See ``LevelDrafting``."""
        feature, logits = (part[: len(texts.lengths)] for part in self.outputs)
        self._feature = feature[:, None]
        return logits

    def extend(self, texts: Texts, level: Level) -> Tensor:
        """Every node reads the feature that its parent gave."""
        above = level.parents[..., None].expand(-1, -1, self._feature.shape[-1])
        feature = self._feature.gather(1, above)  # [B, m, H]
        positions = (texts.lengths + (level.depth - 2))[:, None].expand_as(level.tokens)  # all of a level at one
        held, longest = texts.lengths - 1, texts.longest - 1
        reading = Pass.level(level.tokens, positions, held, longest, level.seen, level.before)
        self._feature, logits = self._read(reading, feature.flatten(0, 1), 0, None)
        return logits

    def drop(self, row: int, last: int, length: int) -> None:
        """See ``Drafting``."""
        self.cache.copy(last, row, length)
        for part in self.outputs:
            part[row] = part[last]

    def _read(self, reading: Pass, feature: Tensor, first: int, asked: Tensor | None) -> tuple[Tensor, Tensor]:
        """The features ``[B, q, H]`` and logits ``[B, q, Vd]`` at the positions ``asked [B, q]`` of those read; None:
        at all of them. feature: ``[B * n, H]``."""
        ids, positions, places, visible, held, size = reading
        batch, count = ids.shape
        self.cache.begin(reading, first)
        cos, sin = self.head.rotary(size, feature)  # no position is beyond its place
        here, queries = positions.flatten(), None
        below = self._within_window(visible, positions, size) if self.head.num_layers > 1 else None
        if asked is not None:
            queries = (torch.arange(0, batch * count, count, device=ids.device)[:, None] + asked).flatten()
            positions = positions.gather(1, asked)  # [B, q]
            visible = torch.arange(size, device=ids.device) <= places.gather(1, asked)[..., None]  # [B, q, S]
        visible = self._within_window(visible, positions, size)
        run = self.head.decoding_pass if held else lambda _, *arguments: forward(self.head, *arguments)
        return run(count, ids, feature, cos[here], sin[here], queries, visible, below, self.cache)

    def _within_window(self, visible: Tensor | None, positions: Tensor, size: int) -> Tensor | None:
        """``visible [B, q, S]`` or None, without what is too long ago for the queries at ``positions [B, q]``. What was
        drafted stands further back than its position says, but a window is longer than a draft."""
        window = self.head.sliding_window
        if window is None or size <= window:
            return visible
        recent = torch.arange(size, device=positions.device) > positions[..., None] - window
        return recent if visible is None else visible & recent


def forward(
    head: Head,
    ids: Tensor,
    feature: Tensor,
    cos: Tensor,
    sin: Tensor,
    queries: Tensor | None,
    visible: Tensor | None,
    below: Tensor | None,
    cache: StaticCache,
) -> tuple[Tensor, Tensor]:
    """A pass with a cache: ids ``[B, n]``, feature ``[B * n, H]``, cos, sin ``[B * n, d]``, queries ``[B * q]`` (None:
    all), visible ``[B, q, S]``, below ``[B, n, S]``: that of layers below the last, where all are queries -> features
    ``[B, q, H]`` and logits ``[B, q, Vd]``."""
    batch, last = len(ids), head.num_layers - 1

    def attention(layer: int, seen: Tensor | None, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        query, key, value = (part.unflatten(0, (batch, -1)).transpose(1, 2) for part in (query, key, value))
        keys, values = cache.update(key, value, layer)  # [B, Hk, S, d]
        mask = None if seen is None else seen[:, None]
        return shared_attention(query, keys, values, mask).flatten(0, 1)  # [B * q, Hq, d]

    attends = [Attend(cos, sin, partial(attention, layer, below), slice(None)) for layer in range(last)]
    attends.append(Attend(cos, sin, partial(attention, last, visible), slice(None) if queries is None else queries))
    hidden, feature = head.read(ids.flatten(), feature, tuple(attends))
    return feature.unflatten(0, (batch, -1)), head.logits(hidden).unflatten(0, (batch, -1))
