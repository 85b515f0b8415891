"""A drafter whose every draft is known: what follows a path stands in a table."""

from collections.abc import Sequence

import torch
from torch import Tensor

from specdraft.decoding.sampling import Chance, Sampling
from specdraft.decoding.tree import ROOT, DraftTrees
from specdraft.drafters.draft_tree_builder import Level, Vocabulary, grow

V = 5

Path = tuple[int, ...]


def chance(count: int = 1, first: int = 0) -> Chance:
    """That of ``count`` requests, one seed after the other."""
    seeds = torch.tensor([Chance.mixed(seed) for seed in range(first, first + count)])
    return Chance(seeds, torch.full_like(seeds, 7))


class Table:
    """A drafter whose logits behind a path of draft ids are drawn once and for all.

    It finds out for itself, from ``parents`` and from ``seen``, which path every node that it reads ends; both must
    tell the same.
    """

    def __init__(self, seed: int = 0, size: int = V, ids: Tensor | None = None, spread: float = 1.5) -> None:
        self.seed, self.size, self.ids, self.spread = seed, size, ids, spread
        self.vocabulary = Vocabulary(V if ids is None else int(ids.max()) + 3, ids)
        self.known: dict[Path, Tensor] = {}

    def logits(self, path: Path) -> Tensor:
        """``[Vd]`` behind a path of target ids."""
        if path not in self.known:
            number = self.seed
            for token in path:
                number = number * 31 + token + 1
            g = torch.Generator().manual_seed(number)
            self.known[path] = self.spread * torch.randn(self.size, generator=g)
        return self.known[path]

    def draft(self, shape, sampling=Sampling(), first=0) -> DraftTrees:  # noqa: B008
        """Of one request, whose seed is ``first``."""
        return self.drafts(shape, sampling, chance(1, first))

    def drafts(self, shape, sampling: Sampling, chance: Chance) -> DraftTrees:
        return draft_all([self] * len(chance.seeds), shape, sampling, chance)

    def begin(self) -> None:
        self.read: list[Path] = []  # of every node read, in order
        self.depths: list[int] = []
        self.level: list[Path] = [()]

    def expand(self, depth: int, tokens: Sequence[int], parents: Sequence[int], seen: Tensor | None) -> Tensor:
        self.level = [(*self.level[above], token) for above, token in zip(parents, tokens, strict=True)]
        self.read += self.level
        self.depths.append(depth)
        for row, path in enumerate(self.level):
            assert len(path) == depth
            if seen is None:
                assert len(self.level) == 1
            else:
                assert seen.shape == (len(self.level), len(self.read))
                ancestors = [self.read[node] for node in seen[row].nonzero()[:, 0].tolist()]
                assert ancestors == [path[:depth] for depth in range(1, len(path) + 1)]
        return torch.stack([self.logits(path) for path in self.level])


def draft_all(tables: Sequence[Table], shape, sampling: Sampling, chance: Chance) -> DraftTrees:
    """The drafts of requests with a table each, side by side."""
    states = [Table(table.seed, table.size, table.ids, table.spread) for table in tables]
    for table, state in zip(tables, states, strict=True):
        state.known = table.known
        state.begin()

    def extend(level: Level) -> Tensor:
        nodes = range(len(states))
        assert level.before == len(states[0].read)
        seen = [None if level.seen is None else level.seen[node] for node in nodes]
        parts = (level.tokens.tolist(), level.parents.tolist(), seen, states)
        return torch.stack([state.expand(level.depth, *rest) for *rest, state in zip(*parts, strict=True)])

    first = torch.stack([table.logits(()) for table in tables])
    trees = grow(first, extend, shape, sampling, chance, tables[0].vocabulary)
    for table, state in zip(tables, states, strict=True):
        table.read, table.depths = state.read, state.depths
    return trees


def nodes_of(trees: DraftTrees, row: int = 0) -> dict[int, Path]:
    """Of one request, the tokens from the first level down to every node that is drafted at all."""
    there = trees.beneath(torch.ones_like(trees.tokens, dtype=torch.bool))[row].tolist()
    paths: dict[int, Path] = {}
    for node, (token, parent) in enumerate(zip(trees.tokens[row].tolist(), trees.parents[row].tolist(), strict=True)):
        if there[node]:
            paths[node] = (*(() if parent == ROOT else paths[parent]), token)
    return paths


def paths_of(trees: DraftTrees, row: int = 0) -> list[Path]:
    return list(nodes_of(trees, row).values())


def children_of(trees: DraftTrees, row: int = 0) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for node in nodes_of(trees, row):
        found.setdefault(int(trees.parents[row, node]), []).append(node)
    return found
