"""Draft trees by hand, verdicts as plain Python, and the chance of many rows."""

from collections import Counter
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from specdraft.decoding.rules import Verdict
from specdraft.decoding.sampling import Chance
from specdraft.decoding.tree import ROOT, DraftTrees


def path_to(parents: Sequence[int], node: int) -> list[int]:
    """The nodes from the first level down to ``node``, by walking up."""
    path: list[int] = []
    while node != ROOT:
        path.insert(0, node)
        node = parents[node]
    return path


def tree_of(
    tokens: Sequence[int], parents: Sequence[int], q: Tensor | None = None, alive: Sequence[bool] | None = None
) -> DraftTrees:
    """The tree of one request; q: ``[N, V]``."""
    depth = max((len(path_to(parents, node)) for node in range(len(parents))), default=0)
    width = max(Counter(parents).values(), default=1)
    rows = (torch.tensor([list(each)], dtype=torch.int64) for each in (tokens, parents))
    there = None if alive is None else torch.tensor([list(alive)])
    return DraftTrees(*rows, None if q is None else q[None], there, depth=depth, width=width)


def chain_of(tokens: Sequence[int], q: Tensor | None = None) -> DraftTrees:
    """The chain of one request; q: ``[N, V]``."""
    return DraftTrees.chains(torch.tensor([list(tokens)], dtype=torch.int64), None if q is None else q[None])


def repeat(trees: DraftTrees, rows: int) -> DraftTrees:
    """The same tree for so many requests."""
    parts = (trees.tokens, trees.parents, trees.q, trees.alive)
    wider = (None if part is None else part.expand(rows, *part.shape[1:]) for part in parts)
    return DraftTrees(*wider, depth=trees.depth, width=trees.width)


def plainly(verdict: Verdict) -> list[tuple[tuple[int, ...], int]]:
    """Of every request the accepted nodes, and the token after them."""
    rows: Iterator[tuple[list[int], int, int]] = zip(*(part.tolist() for part in verdict), strict=True)
    return [(tuple(path[:accepted]), token) for path, accepted, token in rows]


def chance(rows: int, seed: int = 0) -> Chance:
    """That of one seed at so many lengths."""
    return Chance(torch.full((rows,), Chance.mixed(seed)), torch.arange(rows))


def uniform(rows: int, trees: DraftTrees, seed: int = 0) -> Tensor:
    """What a rule needs to verify these trees, ``[rows, N + 1]``."""
    return chance(rows, seed).uniform(0, trees.num_nodes + 1)


def shared_out(uniform: Tensor) -> tuple[Tensor, Tensor]:
    """The numbers ``[B, N + 1]`` of rejection sampling: those of the nodes, and the one that draws the token."""
    return uniform[:, 1:], uniform[:, 0]
