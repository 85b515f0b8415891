"""Drafts among which an evaluation chooses by a sample of its prompts, for every drafter and temperature."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from specdraft.decoding.shapes import DynamicTree, Shape, tree_from_accuracies
from specdraft.errors import UserError


@dataclass(frozen=True)
class Search:
    """Chains of 1 to ``longest`` tokens, and trees of so many nodes each as ``num_nodes`` says, with at most ``top_k``
    children to a node. No trees: chains alone, which every engine verifies."""

    longest: int = 8
    num_nodes: Sequence[int] = ()
    top_k: int = 8

    def __post_init__(self) -> None:
        sizes = isinstance(self.num_nodes, Sequence) and not isinstance(self.num_nodes, str)
        for name, values in (
            ("longest", [self.longest]),
            ("top_k", [self.top_k]),
            ("num_nodes", [*self.num_nodes] if sizes else [None]),
        ):
            if not all(type(value) is int and value >= 1 for value in values):
                given = getattr(self, name)
                wanted = "whole numbers of at least 1" if name == "num_nodes" else "a whole number of at least 1"
                raise UserError(f"decoding.shape.{name} is {given}: expected {wanted}")
        object.__setattr__(self, "num_nodes", tuple(sorted(set(self.num_nodes))))

    def trees(self, best: int, accuracies: Sequence[Sequence[float]] | None) -> list[Shape]:
        """Where a chain of ``best`` tokens is the best one: trees of the most likely tokens, a level deeper, as each of
        their levels is right more often than a chain's. With ``accuracies`` (``[level][rank]``) for sampled drafts,
        whose trees must not depend on what was drawn."""
        if accuracies is None:
            depth = min(best + 1, self.longest)
            return [DynamicTree(depth, min(self.top_k, size), size) for size in self.num_nodes]
        trees = [replace(tree_from_accuracies(accuracies, size), sampled=True) for size in self.num_nodes]
        return [tree for tree in dict.fromkeys(trees) if not tree.is_chain]

    def __str__(self) -> str:
        return "chains or trees, whichever pays most" if self.num_nodes else "chains, as long as pays"
