"""Draft trees: what a drafter proposes and the target verifies in one forward pass.

B = requests, N = drafted nodes, V = target vocabulary. A chain is a tree in which every node has one child.

The trees of all requests are tensors of one shape, so that nothing that is done with them takes longer to launch for
more requests, and nothing has to be read by the host. What differs from request to request is which nodes are
``alive``."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

ROOT = -1
"""The parent of the first level: the last emitted token."""


@dataclass(frozen=True)
class DraftTrees:
    """N drafted tokens for each of B requests.

    tokens: ``[B, N]`` int64, target vocabulary. parents: ``[B, N]`` int64, index of the parent node, ``ROOT`` on the
    first level. Parents come before children, and siblings in the order in which they are to be tried.

    q: ``[B, N, V]`` fp32, the distribution that each token was drawn from, over the target vocabulary; of siblings
    drawn without replacement, the renormalized rest at each draw. None if the tokens were chosen deterministically.
    alive: ``[B, N]`` bool, the nodes that are drafts at all, with every node above them; None: all.

    depth, width: the host's bounds on the number of levels and of a node's children."""

    tokens: Tensor
    parents: Tensor
    q: Tensor | None = None
    alive: Tensor | None = None
    depth: int = field(kw_only=True)
    width: int = field(kw_only=True, default=1)

    @classmethod
    def chains(cls, tokens: Tensor, q: Tensor | None = None, alive: Tensor | None = None) -> "DraftTrees":
        """Chains of the tokens ``[B, N]``, each drafted after the one before."""
        parents = torch.arange(-1, tokens.shape[1] - 1, device=tokens.device).expand_as(tokens)
        return cls(tokens, parents, q, alive, depth=tokens.shape[1])

    @classmethod
    def join(cls, trees: Sequence["DraftTrees"]) -> "DraftTrees":
        """The trees of all, which may differ in their numbers of nodes."""
        if len(trees) == 1:
            return trees[0]

        def joined(parts: Sequence[Tensor]) -> Tensor:
            rows = [row for part in parts for row in part]
            return pad_sequence(rows, batch_first=True)

        tokens = joined([each.tokens for each in trees])
        alive = None
        if any(each.alive is not None for each in trees) or len({each.tokens.shape[1] for each in trees}) > 1:
            alive = joined([torch.ones_like(e.tokens, dtype=torch.bool) if e.alive is None else e.alive for e in trees])
        q = None
        if any(each.q is not None for each in trees):
            size = next(each.q.shape[-1] for each in trees if each.q is not None)
            q = joined([each.distributions(size) for each in trees])
        parents = joined([each.parents - ROOT for each in trees]) + ROOT  # padding hangs on the root
        return cls(tokens, parents, q, alive, depth=max(e.depth for e in trees), width=max(e.width for e in trees))

    @property
    def num_nodes(self) -> int:
        """N."""
        return self.tokens.shape[1]

    @property
    def is_chain(self) -> bool:
        """Whether every node is the one child of the node before it, in every tree."""
        return self.width == 1 and self.depth == self.num_nodes

    @cached_property
    def ancestors(self) -> Tensor:
        """Bool ``[B, N, N]``: row i marks node i and every node above it, all that node i may attend to."""
        index = torch.arange(self.num_nodes, device=self.tokens.device)
        if self.is_chain:
            return (index <= index[:, None]).expand(len(self.tokens), -1, -1)
        near = (self.parents[..., None] == index) | (index == index[:, None])  # itself and its parent
        reach = 1
        while reach < self.depth - 1:
            near = (near.float() @ near.float()) > 0
            reach *= 2
        return near

    @cached_property
    def depths(self) -> Tensor:
        """The level of every node, from 1, ``[B, N]``."""
        return self.ancestors.sum(-1)

    @cached_property
    def ranks(self) -> Tensor:
        """Of every node the number of siblings before it, ``[B, N]``."""
        same = self.parents[..., None] == self.parents[:, None]
        return same.tril(-1).sum(-1)

    def distributions(self, size: int) -> Tensor:
        """``q``, or of chosen tokens the point masses that stand for them, ``[B, N, V]``; ``size`` is V."""
        return torch.nn.functional.one_hot(self.tokens, size).float() if self.q is None else self.q

    def beneath(self, right: Tensor) -> Tensor:
        """Which nodes ``[B, N]`` are ``right`` (bool ``[B, N]``) and alive, with all above them."""
        if self.alive is not None:
            right = right & self.alive
        return (right[:, None] | ~self.ancestors).all(-1)

    def truncate(self, rooms: Tensor) -> "DraftTrees":
        """The trees without the levels beyond ``rooms [B]``."""
        alive = self.depths <= rooms[:, None]
        alive = alive if self.alive is None else alive & self.alive
        return replace(self, alive=alive)


def empty(rows: int, device: torch.device) -> DraftTrees:
    """Nothing drafted: verifying it is a plain decoding step."""
    return DraftTrees.chains(torch.empty((rows, 0), dtype=torch.int64, device=device))


def with_root(seen: Tensor) -> Tensor:
    """``[B, N, N]`` of the nodes as ``[B, N + 1, N + 1]`` with the root, which every node sees, in the first place."""
    seen = pad(seen, (1, 0, 1, 0))
    seen[..., 0] = True
    return seen
