"""How P-EAGLE drafts: as EAGLE, but one pass over masks for all tokens after the first.

B = requests, K = drafted tokens, H = hidden size, Vd = draft vocabulary."""

# ruff: noqa: D102  (a head's methods are described where they are defined)

from typing import Protocol

import torch
from torch import Tensor

from specdraft.decoding.passes import Pass, Texts
from specdraft.decoding.sampling import Chance, Sampling
from specdraft.decoding.shapes import ForcedPath, Shape
from specdraft.decoding.tree import DraftTrees
from specdraft.drafters.draft_tree_builder import Level
from specdraft.drafters.eagle.drafting import EagleDrafting, Head


class MaskHead(Head, Protocol):
    """What a ``PEagle`` is to its drafting."""

    mask_token: int
    ttt_steps: int

    def mask_feature(self) -> Tensor: ...


class MaskDrafting(EagleDrafting):
    """Behind the keys of what was emitted stand those of the masks, until the next tokens take their place."""

    head: MaskHead

    def __init__(self, head: MaskHead, rows: int, capacity: int) -> None:
        super().__init__(head, rows, capacity)
        self._masks = head.ttt_steps - 1  # of the draft that is made
        self._logits = torch.empty(0)  # at them, [B, K - 1, Vd]

    def draft(self, texts: Texts, shape: Shape | ForcedPath, sampling: Sampling, chance: Chance | None) -> DraftTrees:
        """One pass over a mask for every level but the first."""
        shape = shape.truncate(self.head.ttt_steps)
        self._masks = shape.depth - 1
        return super().draft(texts, shape, sampling, chance)

    def first(self, texts: Texts) -> Tensor:
        """See ``LevelDrafting``."""
        logits = super().first(texts)
        if self._masks:
            ids = torch.full((len(logits), self._masks), self.head.mask_token, device=logits.device)
            held = texts.lengths - 1
            positions = held[:, None] + torch.arange(self._masks, device=ids.device)
            reading = Pass.level(ids, positions, held, texts.longest - 1, None)
            feature = self.head.mask_feature().expand(ids.numel(), -1)
            _, self._logits = self._read(reading, feature, 0, None)
        return logits

    def extend(self, texts: Texts, level: Level) -> Tensor:
        """Whatever was drafted above."""
        return self._logits[:, level.depth - 1, None].expand(-1, level.tokens.shape[1], -1)
