"""How DFlash drafts: the context's keys in a cache, and one pass over a block for all tokens of a draft.

B = requests, n = tokens that each emitted, S = slots of a block, K = drafted tokens, m = nodes of a level, H = hidden
size, Hk = key-value heads, d = head size, Vd = draft vocabulary."""

# ruff: noqa: D102  (a drafter's methods are described where they are defined)

from collections.abc import Sequence
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from specdraft.attention import shared_attention
from specdraft.decoding.cache import StaticCache
from specdraft.decoding.compilation import Compilable
from specdraft.decoding.passes import Pass, Texts
from specdraft.decoding.sampling import Chance, Sampling
from specdraft.decoding.shapes import ForcedPath, Shape
from specdraft.decoding.tree import DraftTrees
from specdraft.drafters.dflash.layer import Angles, Attention
from specdraft.drafters.draft_tree_builder import Level, Vocabulary
from specdraft.drafters.drafting import LevelDrafting
from specdraft.drafters.rotary import RotaryTable
from specdraft.targets import Features


class Drafter(Protocol):
    """What a ``DFlash`` is to its drafting."""

    rotary: RotaryTable
    decoding_pass: Compilable
    num_layers: int
    causal: bool

    @property
    def first_slot(self) -> int: ...
    @property
    def num_drafts(self) -> int: ...
    @property
    def vocabulary(self) -> Vocabulary: ...
    def context(self, aux: Tensor) -> Tensor: ...
    def context_keys(self, context: Tensor, angles: Angles) -> list[tuple[Tensor, Tensor]]: ...
    def masked(self, anchors: Tensor, num_slots: int) -> Tensor: ...
    def read(self, tokens: Tensor, angles: Angles, attentions: Sequence[Attention]) -> Tensor: ...
    def logits(self, hidden: Tensor) -> Tensor: ...


class BlockDrafting(LevelDrafting):
    """Keys and values of each request's context, which holds a position less than the text has tokens, and its last
    token. A block's own stand behind them until the next tokens take their place."""

    def __init__(self, drafter: Drafter, rows: int, capacity: int) -> None:
        self.drafter, self.vocabulary = drafter, drafter.vocabulary
        self.rows, self.cache = rows, StaticCache(drafter.num_layers, rows, capacity)
        self.token = torch.empty(0, dtype=torch.int64)  # [rows], the last one emitted
        self._num_drafts = drafter.num_drafts  # of the draft that is made
        self._logits = self._hidden = torch.empty(0)  # of it, [B, K, Vd] and [B, K, H]

    def begin(self, row: int, first_token: int) -> None:
        """See ``Drafting``."""

    def advance(self, texts: Texts, tokens: Tensor, counts: Tensor, features: Features) -> None:
        """Append what was emitted; its keys replace those of the block that was drafted there."""
        reading = Pass.text(tokens, texts.lengths - 1, texts.longest - 1)
        self.cache.begin(reading, texts.first)
        context = self.drafter.context(features.aux.flatten(0, 1))  # [B * n, H]
        for layer, parts in enumerate(self.drafter.context_keys(context, self._angles(reading, context))):
            self.cache.update(*(_by_request(part, len(tokens)) for part in parts), layer)
        if not len(self.token):
            self.token = tokens.new_zeros(self.rows)
        self.token[texts.first : texts.first + len(tokens)] = tokens.gather(1, (counts - 1)[:, None])[:, 0]

    def draft(self, texts: Texts, shape: Shape | ForcedPath, sampling: Sampling, chance: Chance | None) -> DraftTrees:
        """One pass over as many slots as draft the levels, and those before them."""
        shape = shape.truncate(self.drafter.num_drafts)
        self._num_drafts = shape.depth
        return super().draft(texts, shape, sampling, chance)

    def first(self, texts: Texts) -> Tensor:
        """See ``LevelDrafting``."""
        size = self._num_drafts + self.drafter.first_slot
        ids = self.drafter.masked(self.token[: len(texts.lengths)], size)  # [B, S]
        slots = torch.arange(ids.shape[1], device=ids.device)
        positions, seen = (texts.lengths - 1)[:, None] + slots, None
        if not self.drafter.causal:
            seen = torch.ones((len(ids), ids.shape[1], ids.shape[1]), dtype=torch.bool, device=ids.device)
        reading = Pass.level(ids, positions, texts.lengths - 1, texts.longest - 1, seen)
        self.cache.begin(reading, 0)
        angles = self._angles(reading, self.cache.layers[0].keys)
        run = self.drafter.decoding_pass
        self._logits, self._hidden = run(ids.shape[1], ids, *angles, reading.visible, self.cache)
        return self._logits[:, 0]

    def extend(self, texts: Texts, level: Level) -> Tensor:
        """Whatever was drafted above."""
        return self._logits[:, level.depth, None].expand(-1, level.tokens.shape[1], -1)

    def drop(self, row: int, last: int, length: int) -> None:
        """See ``Drafting``."""
        self.cache.copy(last, row, length)
        self.token[row] = self.token[last]

    def _angles(self, reading: Pass, like: Tensor) -> Angles:
        cos, sin = self.drafter.rotary(reading.size, like)  # no position is beyond its place
        here = reading.positions.flatten()
        return Angles(cos[here], sin[here])


def forward(
    drafter: Drafter, ids: Tensor, cos: Tensor, sin: Tensor, visible: Tensor | None, cache: StaticCache
) -> tuple[Tensor, Tensor]:
    """A pass over blocks: ids ``[B, S]``, cos, sin ``[B * S, d]``, visible ``[B, S, keys]`` -> logits ``[B, K, Vd]``
    and hidden states ``[B, K, H]`` of the slots that draft."""
    batch = len(ids)
    mask = None if visible is None else visible[:, None]

    def attention(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        keys, values = cache.update(_by_request(key, batch), _by_request(value, batch), layer)  # [B, Hk, keys, d]
        attended = shared_attention(_by_request(query, batch), keys, values, mask)
        return attended.flatten(0, 1)  # [B * S, Hq, d]

    attentions = [partial(attention, layer) for layer in range(drafter.num_layers)]
    hidden = drafter.read(ids.flatten(), Angles(cos, sin), attentions).unflatten(0, (batch, -1))  # [B, S, H]
    hidden = hidden[:, drafter.first_slot :]
    return drafter.logits(hidden), hidden


def _by_request(heads: Tensor, batch: int) -> Tensor:
    """``[B * n, heads, d]`` -> ``[B, heads, n, d]``."""
    return heads.unflatten(0, (batch, -1)).transpose(1, 2)
