"""How an EAGLE head drafts: the same forward as in training, its keys in a cache.

B = requests, n = positions that each reads, m = nodes of a level, H = hidden size, Hq / Hk = query / key-value heads,
d = head size, Vd = draft vocabulary."""

# ruff: noqa: D102  (a head's methods are described where they are defined)

from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from specdraft.decoding.cache import StaticCache
from specdraft.decoding.compilation import Compilable
from specdraft.decoding.passes import Pass, Texts
from specdraft.drafters.draft_tree_builder import Level, Vocabulary
from specdraft.drafters.drafting import LevelDrafting
from specdraft.drafters.eagle.forward import Attend, Output
from specdraft.drafters.eagle.rotary import RotaryTable
from specdraft.targets import Features


class Head(Protocol):
    """What an ``EagleHead`` is to its drafting."""

    rotary: RotaryTable
    decoding_pass: Compilable

    @property
    def vocabulary(self) -> Vocabulary: ...
    def feature(self, features: Features) -> Tensor: ...
    def read(self, tokens: Tensor, feature: Tensor, attend: Attend) -> Output: ...
    def logits(self, hidden: Tensor) -> Tensor: ...


class EagleDrafting(LevelDrafting):
    """The keys and values of all emitted positions of each request, and its output at the last one. The first token
    of a text has no feature before it, so the head never sees it: it holds a position less than the text has tokens."""

    def __init__(self, head: Head, rows: int, capacity: int) -> None:
        self.head, self.vocabulary = head, head.vocabulary
        self.rows, self.cache = rows, StaticCache(1, rows, capacity)
        self.outputs: list[Tensor] = []  # [rows, H] and [rows, Vd]
        self._feature = torch.empty(0)  # of the level that was read last, [B, m, H]

    def begin(self, row: int, first_token: int) -> None:
        """See ``Drafting``."""

    def advance(self, texts: Texts, tokens: Tensor, counts: Tensor, features: Features) -> None:
        """Append what was emitted; its keys replace those of what was drafted there."""
        reading = Pass.text(tokens, texts.lengths - 1, texts.longest - 1, simple=True)  # the one that is asked sees all
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
        self.cache.drop(row, last, length)
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
        if asked is not None:
            queries = (torch.arange(0, batch * count, count, device=ids.device)[:, None] + asked).flatten()
            visible = torch.arange(size, device=ids.device) <= places.gather(1, asked)[..., None]  # [B, q, S]
        run = self.head.decoding_pass if held else lambda _, *arguments: forward(self.head, *arguments)
        return run(count, ids, feature, cos[here], sin[here], queries, visible, self.cache)


def forward(
    head: Head,
    ids: Tensor,
    feature: Tensor,
    cos: Tensor,
    sin: Tensor,
    queries: Tensor | None,
    visible: Tensor | None,
    cache: StaticCache,
) -> tuple[Tensor, Tensor]:
    """A pass with a cache: ids ``[B, n]``, feature ``[B * n, H]``, cos, sin ``[B * n, d]``, queries ``[B * q]`` (None:
    all), visible ``[B, q, S]`` -> features ``[B, q, H]`` and logits ``[B, q, Vd]``."""
    batch = len(ids)

    def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        query, key, value = (part.unflatten(0, (batch, -1)).transpose(1, 2) for part in (query, key, value))
        keys, values = cache.update(key, value, 0)  # [B, Hk, S, d]
        mask = None if visible is None else visible[:, None]
        attended = scaled_dot_product_attention(query, keys, values, attn_mask=mask, enable_gqa=True)
        return attended.transpose(1, 2).flatten(0, 1)  # [B * q, Hq, d]

    attend = Attend(cos, sin, attention, slice(None) if queries is None else queries)
    hidden, feature = head.read(ids.flatten(), feature, attend)
    return feature.unflatten(0, (batch, -1)), head.logits(hidden).unflatten(0, (batch, -1))
