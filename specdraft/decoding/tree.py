"""Draft trees: what a drafter proposes and the target verifies in one forward pass.

N = drafted nodes, V = target vocabulary. Masks, depths and children are derived from ``parents``, never stored beside
it. A chain is a tree in which every node has one child."""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

ROOT = -1
"""The parent of the first level: the last emitted token."""


@dataclass(frozen=True)
class DraftTree:
    """N drafted tokens as flat tensors.

    tokens: ``[N]`` int64, target vocabulary. parents: ``[N]`` int64, index of the parent node, ``ROOT`` on the first
    level. Parents come before children, and siblings in the order in which they are to be tried.

    q: ``[N, V]`` fp32, the distribution that each token was drawn from, over the target vocabulary; of siblings drawn
    without replacement, the renormalized rest at each draw. None if the tokens were chosen deterministically."""

    tokens: Tensor
    parents: Tensor
    q: Tensor | None = None

    @classmethod
    def chain(cls, tokens: Tensor, q: Tensor | None = None) -> "DraftTree":
        """A chain of the tokens ``[N]``, each drafted after the one before."""
        return cls(tokens, torch.arange(-1, tokens.shape[0] - 1), q)

    @classmethod
    def empty(cls, device: torch.device | None = None) -> "DraftTree":
        """Nothing drafted: verifying it is a plain decoding step."""
        return cls.chain(torch.empty(0, dtype=torch.int64, device=device))

    def __len__(self) -> int:
        return self.tokens.shape[0]

    @cached_property
    def parent_list(self) -> list[int]:
        """``parents`` as Python numbers."""
        return self.parents.tolist()

    @cached_property
    def is_chain(self) -> bool:
        """Whether every node is the one child of the node before it."""
        return self.parent_list == list(range(-1, len(self) - 1))

    @cached_property
    def depths(self) -> list[int]:
        """The level of every node, from 1."""
        depths: list[int] = []
        for parent in self.parent_list:
            depths.append(1 if parent == ROOT else depths[parent] + 1)
        return depths

    @property
    def depth(self) -> int:
        """The deepest level; 0 if nothing was drafted."""
        return max(self.depths, default=0)

    @cached_property
    def children(self) -> dict[int, list[int]]:
        """The children of every node that has any, ``ROOT`` included, in the order in which they are to be tried."""
        children: dict[int, list[int]] = {}
        for node, parent in enumerate(self.parent_list):
            children.setdefault(parent, []).append(node)
        return children

    def ancestors(self) -> Tensor:
        """Bool ``[N, N]`` on the CPU: row i marks node i and every node above it, all that node i may attend to."""
        seen = torch.eye(len(self), dtype=torch.bool)
        for node, parent in enumerate(self.parent_list):
            if parent != ROOT:
                seen[node] |= seen[parent]
        return seen
