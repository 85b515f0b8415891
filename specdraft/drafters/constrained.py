"""Drafts under a grammar: what a drafter says is masked, level by level, as the target's own words are.

B = requests, m = nodes of a level, Vd = draft vocabulary."""

import torch
from torch import Tensor

from specdraft.decoding.grammar import Followed, Tokens
from specdraft.drafters.draft_tree_builder import Extend, Level, Vocabulary


class Constrained:
    """The levels of one draft for the requests from row ``first`` on."""

    def __init__(self, followed: Followed, first: int, vocabulary: Vocabulary, extend: Extend) -> None:
        """``extend`` is the drafter's own."""
        self._followed, self._first, self._vocabulary, self._extend = followed, first, vocabulary, extend
        self._paths: list[list[Tokens]] = []  # of the nodes of the level read last

    def start(self, logits: Tensor) -> Tensor:
        """``[B, Vd]`` after the last emitted tokens, masked."""
        self._paths = [[()] for _ in range(len(logits))]
        return self._masked(logits[:, None])[:, 0]

    def extend(self, level: Level) -> Tensor:
        """Read a level; the logits ``[B, m, Vd]`` after each of its nodes, masked."""
        logits = self._extend(level)
        both = torch.stack([level.tokens, level.parents], dim=-1).tolist()
        self._paths = [
            [(*above[parent], token) for token, parent in nodes]
            for above, nodes in zip(self._paths, both, strict=True)
        ]  # fmt: skip
        return self._masked(logits)

    def _masked(self, logits: Tensor) -> Tensor:
        allowed = self._followed.allowed(self._paths, self._first)
        if self._vocabulary.ids is not None:
            allowed = allowed[..., self._vocabulary.ids]
        # A drafter that has none of the allowed tokens drafts what it likes, and is rejected.
        return logits.masked_fill(~allowed & allowed.any(-1, keepdim=True), -torch.inf)
