"""DFlash whose slots are corrected by what was drafted before them: the block costs one pass, a token a small product.

B = requests, A = blocks, K = drafted tokens, m = nodes of a level, H = hidden size, g = state of a prefix, r = width of
the correction, Vd = draft vocabulary.

    logits of slot s = lm_head(h_s) + projection(correction(h_s, state of the tokens before it in the block))

- The tokens before the first slot are the anchor alone. In training those of the text are read, all slots at once; in
  decoding those that were drafted, level by level, each node behind its own parent.
- So what a node is drawn from is conditional on its path, and branches of a tree differ. Rejection sampling is exact
  with that distribution, and with no other: not with the slot's marginal.
- The loss adds the two products chunk by chunk; logits of all slots are never there at once."""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from specdraft.decoding.passes import Texts
from specdraft.drafters.dflash.dflash import DFlash, Slots
from specdraft.drafters.dflash.drafting import BlockDrafting
from specdraft.drafters.draft_tree_builder import Level
from specdraft.drafters.objective import DraftHead
from specdraft.losses.chunked import Correction, Step


class Sequential(DFlash):
    """A DFlash with a correction; a subclass says of what."""

    @property
    @abstractmethod
    def projection(self) -> DraftHead:
        """Of the correction to the draft vocabulary, ``[Vd, r]``."""

    @abstractmethod
    def read_prefix(self, tokens: Tensor, state: Tensor | None = None) -> Tensor:
        """The states ``[N, t, g]`` of N prefixes after each of their next ``tokens [N, t]``; ``state [N, g]`` is what
        they were before, None where the first token is the anchor."""

    @abstractmethod
    def correction(self, hidden: Tensor, state: Tensor) -> Tensor:
        """What is projected, ``[..., r]``, of slots ``[..., H]`` and the states ``[..., g]`` of what is before them."""

    def corrected(self, steps: Sequence[Step], slots: Slots, state: Tensor) -> list[Step]:
        """The steps with their corrections, projected by the second head; ``state [A, K, g]``."""
        given = self.correction(slots.hidden, state)  # [A, K, r]
        pairs = enumerate(zip(steps, slots.rows, strict=True))
        return [replace(step, correction=Correction(given[rows, index], 1)) for index, (step, rows) in pairs]

    def training_flops(self, sequence_length: int) -> tuple[float, float]:
        """DFlash's, and the matrices of the correction once a slot that drafts; an embedding is looked up."""
        forward, backward = super().training_flops(sequence_length)
        matrices = sum(matrix.numel() for matrix in self.correcting_matrices())
        correcting = 2.0 * self.share_kept(sequence_length) * self.num_drafts * matrices
        return forward + correcting, backward + 2 * correcting

    def activation_bytes(self, tokens: int, element: int) -> float:
        """DFlash's, and what the matrices of the correction read, and as much again between them."""
        inputs = sum(matrix.shape[1] for matrix in self.correcting_matrices())
        correcting = self.share_kept(tokens) * self.num_drafts * 2 * inputs * tokens * element
        return super().activation_bytes(tokens, element) + correcting

    @abstractmethod
    def correcting_matrices(self) -> list[Tensor]:
        """Those that every slot that drafts is multiplied by, beside DFlash's."""

    def drafting(self, rows: int, capacity: int) -> "SequentialDrafting":
        """See ``Drafter``."""
        return SequentialDrafting(self, rows, capacity)


class SequentialDrafting(BlockDrafting):
    """A block's pass once a round; then each level's tokens are read, and its slot is corrected for every node."""

    def __init__(self, drafter: Sequential, rows: int, capacity: int) -> None:
        super().__init__(drafter, rows, capacity)
        self.corrector = drafter
        self._state = torch.empty(0)  # of the level that is read, [B, m, g]

    def first(self, texts: Texts) -> Tensor:
        """See ``LevelDrafting``."""
        logits = super().first(texts)
        self._state = self.corrector.read_prefix(self.token[: len(logits), None])  # [B, 1, g]
        return self._correct(logits[:, None], 0)[:, 0]

    def extend(self, texts: Texts, level: Level) -> Tensor:
        """See ``LevelDrafting``."""
        above = level.parents[..., None].expand(-1, -1, self._state.shape[-1])
        above = self._state.gather(1, above).flatten(0, 1)  # [B * m, g]
        after = self.corrector.read_prefix(level.tokens.flatten()[:, None], above)  # [B * m, 1, g]
        self._state = after[:, 0].unflatten(0, level.tokens.shape)
        return self._correct(super().extend(texts, level), level.depth)

    def _correct(self, logits: Tensor, depth: int) -> Tensor:
        """The logits ``[B, m, Vd]`` of the level's slot, each with what its own path adds."""
        hidden = self._hidden[:, depth, None].expand(-1, logits.shape[1], -1)
        return logits + self.corrector.projection(self.corrector.correction(hidden, self._state))
