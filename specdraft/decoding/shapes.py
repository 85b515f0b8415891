"""The shapes that drafts can take: a chain, a tree known beforehand, or a tree that grows where the draft is sure.

A shape says how many tokens to draft and where; ``drafters/draft_tree_builder.py`` grows a draft of that shape from any
drafter that can tell what follows a node."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

from torch import Tensor

from specdraft.decoding.pacing import Goodput
from specdraft.decoding.stopping import JointStop, Stop
from specdraft.errors import UserError

Path = tuple[int, ...]
LONGEST = 512  # tokens of a draft: a round has to read them all, and none that was measured accepts nearly as many
AUTO = "auto"  # as many drafted tokens as an evaluation finds to pay


def draft_tokens(number: int | str, otherwise: int = 5) -> int:
    """The number of drafted tokens where it must be known beforehand: ``otherwise`` for "auto"."""
    return otherwise if isinstance(number, str) else number


@dataclass(frozen=True)
class StaticTree:
    """A tree known beforehand. A path names a node by its rank among its siblings at every level: ``(0, 2)`` is the
    third-best continuation of the best first token (the notation of Medusa, 2401.10774, section 2.3).
    sampled: at temperatures above 0 siblings are drawn from the draft's distribution, without replacement; else they
    are its most likely tokens, which is what serving engines draft. stop: of a chain, where a draft ends early, by what
    it says as it grows, or by what was accepted of earlier ones."""

    paths: tuple[Path, ...]
    sampled: bool = True
    stop: Stop | JointStop | Goodput | None = None

    def __post_init__(self) -> None:
        paths = sorted({tuple(int(rank) for rank in path) for path in self.paths}, key=lambda path: (len(path), path))
        known = {(), *paths}
        for path in paths:
            whole = path and min(path) >= 0 and path[:-1] in known
            if not whole or (path[-1] > 0 and (*path[:-1], path[-1] - 1) not in known):
                wanted = "paths of ranks from 0, with all prefixes and smaller last ranks, as [[0], [1], [0, 0]]"
                found = f"a node {list(path)} without its parent or its better sibling"
                raise UserError(f"the draft tree has {found}: expected {wanted}")
        if not paths:
            raise UserError("the draft tree has no nodes: expected at least one path, as [[0]]")
        object.__setattr__(self, "paths", tuple(paths))
        if self.stop is not None and not self.is_chain:
            raise UserError("a draft tree is to end early where the draft is unsure: expected a chain")

    @classmethod
    def chain(cls, num_tokens: int, sampled: bool = True, stop: Stop | Goodput | None = None) -> "StaticTree":
        """A chain of ``num_tokens`` tokens, or of fewer where ``stop`` ends it. Raises UserError for a number that is
        not from 1 to 512."""
        if type(num_tokens) is not int or num_tokens < 1:
            mend = "to decode plainly, leave the drafter out"
            raise UserError(f"num_draft_tokens is {num_tokens}: expected at least 1; {mend}")
        if num_tokens > LONGEST:
            raise UserError(f"num_draft_tokens is {num_tokens}: expected at most {LONGEST} drafted tokens a round")
        return cls(tuple((0,) * depth for depth in range(1, num_tokens + 1)), sampled, stop)

    @property
    def depth(self) -> int:
        """The number of levels: the most tokens that a round can accept."""
        return len(self.paths[-1])

    @property
    def num_nodes(self) -> int:
        """The most nodes that a draft has."""
        return len(self.paths)

    @property
    def num_places(self) -> int:
        """The most nodes that are read when it is drafted, or verified."""
        return len(self.paths)

    @property
    def width(self) -> int:
        """The most children that a node has."""
        return 1 + max(path[-1] for path in self.paths)

    @property
    def is_chain(self) -> bool:
        """Whether no node has two children."""
        return len(self.paths) == self.depth

    def truncate(self, depth: int) -> "StaticTree":
        """The first ``depth`` levels."""
        if depth >= self.depth:
            return self
        return replace(self, paths=tuple(path for path in self.paths if len(path) <= depth))

    @cached_property
    def branching(self) -> list[list[int]]:
        """Per level, the number of children of every node of the level above, in order (level 0 is the root alone)."""
        levels = [[path for path in ((), *self.paths) if len(path) == depth] for depth in range(self.depth + 1)]
        return [[sum(child[:-1] == node for child in below) for node in level] for level, below in pairwise(levels)]

    def __str__(self) -> str:
        how = "" if self.sampled else ", most likely tokens"
        how += "" if self.stop is None else f", {self.stop}"
        return f"chain of {self.depth}{how}" if self.is_chain else f"static tree of {self.num_nodes}{how}"


@dataclass(frozen=True)
class DynamicTree:
    """The tree of EAGLE-2 (2406.16858, section 4): at every level the ``top_k`` nodes of highest joint draft
    probability grow ``top_k`` children each; in the end the ``num_nodes`` most probable nodes of all are verified.
    Its tokens are chosen, not sampled: a tree whose shape depends on sampled tokens would not be lossless."""

    depth: int = 5
    top_k: int = 8
    num_nodes: int = 32

    def __post_init__(self) -> None:
        for name in ("depth", "top_k", "num_nodes"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise UserError(f"the dynamic tree's {name} is {value}: expected a whole number of at least 1")
        if self.depth > LONGEST:
            raise UserError(f"the dynamic tree's depth is {self.depth}: expected at most {LONGEST}")

    @property
    def num_places(self) -> int:
        """The most nodes that are read when it is drafted, or verified."""
        return max(self.num_nodes, (self.depth - 1) * self.top_k)

    def truncate(self, depth: int) -> "DynamicTree":
        """The first ``depth`` levels."""
        return self if depth >= self.depth else DynamicTree(depth, self.top_k, self.num_nodes)

    def __str__(self) -> str:
        return f"dynamic tree of {self.num_nodes}, depth {self.depth}, top {self.top_k}"


@dataclass(frozen=True)
class ForcedPath:
    """Not to be verified, but to be looked at: at every level the ``top_k`` most likely tokens, given that the levels
    above hold the ``tokens [B, depth]`` of each request."""

    tokens: Tensor
    top_k: int

    @property
    def depth(self) -> int:
        """The number of levels."""
        return self.tokens.shape[1]

    def truncate(self, depth: int) -> "ForcedPath":
        """The first ``depth`` levels."""
        return ForcedPath(self.tokens[:, :depth], self.top_k)


Shape = StaticTree | DynamicTree


def as_shape(draft: "Shape | int") -> "Shape":
    """A shape; a number is a chain of that many tokens. Raises UserError below 1."""
    return draft if isinstance(draft, StaticTree | DynamicTree) else StaticTree.chain(draft)


def tree_from_accuracies(accuracies: Sequence[Sequence[float]], num_nodes: int) -> StaticTree:
    """The static tree of ``num_nodes`` nodes, or of all that were measured, with the greatest expected acceptance.

    accuracies: ``[level][rank]``, how often the token of that rank at that level is the target's own choice, given
    that everything above it was. Greedy expansion: the node of greatest joint probability is added next (Medusa,
    2401.10774, section 2.3.3), which is best where accuracies fall from rank to rank, as a draft's own order has it.
    Raises UserError if the accuracies are no probabilities, or leave no node."""
    if not accuracies or not all(0 <= accuracy <= 1 for level in accuracies for accuracy in level):
        raise UserError("a tree needs accuracies between 0 and 1 for every level and rank")
    # Of every open node, the joint probability of its parent and its own.
    above: dict[Path, float] = {(0,): 1.0} if accuracies[0] else {}
    chosen: list[Path] = []

    def joint(path: Path) -> float:
        return above[path] * accuracies[len(path) - 1][path[-1]]

    while above and len(chosen) < num_nodes:
        path = max(above, key=lambda node: (joint(node), -len(node), tuple(-rank for rank in node)))
        chosen.append(path)
        depth, rank = len(path), path[-1]
        if rank + 1 < len(accuracies[depth - 1]):
            above[(*path[:-1], rank + 1)] = above[path]
        if depth < len(accuracies) and accuracies[depth]:
            above[(*path, 0)] = joint(path)
        del above[path]
    if not chosen:
        given = f"{num_nodes} nodes from {len(accuracies[0])} accuracies of the first level"
        raise UserError(f"the draft tree is to have {given}: expected at least one of each")
    return StaticTree(tuple(chosen))


def tree_from_ranks(shares: Sequence[float], depth: int, num_nodes: int) -> StaticTree:
    """``tree_from_accuracies`` where every one of ``depth`` levels has the same ``shares``, by rank."""
    return tree_from_accuracies([shares] * depth, num_nodes)
