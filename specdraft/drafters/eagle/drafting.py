"""How an EAGLE head drafts: the same forward as in training, its keys in a cache.

B = requests, n = positions that each reads, m = nodes of a level, H = hidden size, Hq / Hk = query / key-value heads,
d = head size, Vd = draft vocabulary."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from specdraft.decoding.cache import StaticCache
from specdraft.decoding.passes import Pass, Texts
from specdraft.drafters.draft_tree_builder import Level
from specdraft.drafters.drafting import LevelDrafting
from specdraft.drafters.eagle.forward import Attend, Output
from specdraft.targets import Features

if TYPE_CHECKING:
    from specdraft.drafters.eagle.head import EagleHead


class EagleDrafting(LevelDrafting):
    """The keys and values of all emitted positions of each request, and its output at the last one. The first token
    of a text has no feature before it, so the head never sees it: it holds a position less than the text has tokens."""

    def __init__(self, head: "EagleHead", rows: int, capacity: int) -> None:
        self.head, self.vocabulary = head, head.vocabulary
        self.cache = StaticCache(1, rows, capacity)
        like, size = next(head.parameters()), head.layer_config.hidden_size
        self.output = Output(like.new_zeros(rows, size), like.new_zeros(rows, size))
        self._level = self.output  # of the level that was read last, [B, m, H]

    def begin(self, row: int, first_token: int) -> None:
        """See ``Drafting``."""

    def advance(self, texts: Texts, tokens: Tensor, counts: Tensor, features: Features) -> None:
        """Append what was emitted; its keys replace those of what was drafted there."""
        reading = Pass.text(tokens, texts.lengths - 1, texts.longest - 1, simple=True)  # the one that is asked sees all
        output = self._read(reading, self.head.feature(features), texts.first, (counts - 1)[:, None])
        for kept, new in zip(self.output, output, strict=True):
            kept[texts.first : texts.first + len(tokens)] = new[:, 0]

    def first(self, texts: Texts) -> Tensor:
        """See ``LevelDrafting``."""
        batch = len(texts.lengths)
        self._level = Output(*(part[:batch, None] for part in self.output))
        return self.head.logits(self.output.hidden[:batch])

    def extend(self, texts: Texts, level: Level) -> Tensor:
        """Every node reads the feature that its parent gave."""
        above = level.parents[..., None].expand(-1, -1, self._level.feature.shape[-1])
        feature = self._level.feature.gather(1, above)  # [B, m, H]
        positions = (texts.lengths + (level.depth - 2))[:, None].expand_as(level.tokens)  # all of a level at one
        held, longest = texts.lengths - 1, texts.longest - 1
        reading = Pass.level(level.tokens, positions, held, longest, level.seen, level.before)
        self._level = self._read(reading, feature.flatten(0, 1), 0, None)
        return self.head.logits(self._level.hidden.flatten(0, 1)).unflatten(0, level.tokens.shape)

    def drop(self, row: int, last: int, length: int) -> None:
        """See ``Drafting``."""
        self.cache.drop(row, last, length)
        for part in self.output:
            part[row] = part[last]

    def _read(self, reading: Pass, feature: Tensor, first: int, asked: Tensor | None) -> Output:
        """The output ``[B, q, H]`` at the positions ``asked [B, q]`` of those read; None: at all of them. feature:
        ``[B * n, H]``."""
        ids, positions, places, visible, _, size = reading
        batch, count = ids.shape
        self.cache.begin(reading, first)
        cos, sin = self.head.rotary(size, feature)  # no position is beyond its place
        here = positions.flatten()
        queries: Tensor | slice = slice(None)
        if asked is not None:
            rows = torch.arange(batch, device=ids.device)[:, None]
            queries = (rows * count + asked).flatten()
            visible = torch.arange(size, device=ids.device) <= places.gather(1, asked)[..., None]  # [B, q, S]

        def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            query, key, value = (part.unflatten(0, (batch, -1)).transpose(1, 2) for part in (query, key, value))
            keys, values = self.cache.update(key, value, 0)  # [B, Hk, S, d]
            mask = None if visible is None else visible[:, None]
            attended = scaled_dot_product_attention(query, keys, values, attn_mask=mask, enable_gqa=True)
            return attended.transpose(1, 2).flatten(0, 1)  # [B * q, Hq, d]

        attend = Attend(cos[here], sin[here], attention, queries)
        output = self.head.read(ids.flatten(), feature, attend)
        return Output(*(part.unflatten(0, (batch, -1)) for part in output))
