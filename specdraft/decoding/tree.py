"""Draft trees: what a drafter proposes and the target verifies in one forward pass."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class DraftTree:
    """N drafted tokens as flat tensors; a chain is a tree in which every node has one child.

    tokens: ``[N]`` int64, target vocabulary. parents: ``[N]`` int64, index of the parent node, -1 below the root
    (the last emitted token). Parents come before children. q: ``[N, V]`` fp32, the distribution that each token was
    sampled from, over the target vocabulary; None if the tokens were chosen deterministically.
    """

    tokens: Tensor
    parents: Tensor
    q: Tensor | None = None

    @classmethod
    def chain(cls, tokens: Tensor, q: Tensor | None = None) -> "DraftTree":
        """A chain of the tokens ``[N]``, each drafted after the one before."""
        return cls(tokens, torch.arange(-1, tokens.shape[0] - 1), q)

    def __len__(self) -> int:
        return self.tokens.shape[0]

    @property
    def is_chain(self) -> bool:
        """Whether no node has two children."""
        return torch.equal(self.parents, torch.arange(-1, len(self) - 1))
