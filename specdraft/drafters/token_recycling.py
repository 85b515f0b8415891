"""Token recycling: draft again what the target had in mind after a token the last time (2408.08696, training-free).

B = requests, n = positions of a pass, m = nodes of a level, k = candidates of a token, V = vocabulary.

A pass of the target tells of every token that it reads, rejected drafts included, which k tokens it would have next.
They are kept in one matrix ``[V, k]``, the newest for each token, over all requests; a tree is drafted by looking up
the candidates of the last token, then theirs, and so on. Everything stays on the device, and nothing is waited for."""

from functools import lru_cache

import torch
from torch import Tensor

from specdraft.decoding.interfaces import Drafting
from specdraft.decoding.passes import Texts
from specdraft.decoding.sampling import Chance, Sampling
from specdraft.decoding.shapes import ForcedPath, Shape, StaticTree
from specdraft.decoding.tree import DraftTrees
from specdraft.drafters.base import Drafter, constructor_arguments
from specdraft.errors import UserError
from specdraft.targets import Features, Target

_UNKNOWN = -1  # candidates of a token that the target has not read yet


class TokenRecycling(Drafter):
    """Drafts from the ``top_k`` candidates of every token: a static tree, else a chain of the best ones."""

    def __init__(self, top_k: int = 8) -> None:
        """Raises UserError for no candidate."""
        arguments = constructor_arguments(locals())
        super().__init__()
        if top_k < 1:
            raise UserError(f"token recycling with top_k={top_k}: expected at least 1 candidate for a token")
        self._arguments = arguments
        self.top_k = top_k
        self.candidates = torch.empty((0, top_k), dtype=torch.int64)  # [V, k], once the target is known

    def bind(self, target: Target) -> None:
        """Make room for the candidates of each of its tokens, unless there is."""
        super().bind(target)
        if self.candidates.shape[0] != target.vocab_size or self.candidates.device != target.device:
            size = (target.vocab_size, min(self.top_k, target.vocab_size))
            self.candidates = torch.full(size, _UNKNOWN, device=target.device)

    def forget(self) -> None:
        """Forget all candidates."""
        self.candidates.fill_(_UNKNOWN)

    def drafting(self, rows: int, capacity: int) -> "RecyclingDrafting":
        """See ``Drafter``."""
        return RecyclingDrafting(self, rows)


class RecyclingDrafting(Drafting):
    """The last token of each request ``[rows]``; all else is the drafter's."""

    def __init__(self, drafter: TokenRecycling, rows: int) -> None:
        self.drafter, self.top_tokens = drafter, drafter.candidates.shape[1]
        self.last = torch.zeros(rows, dtype=torch.int64, device=drafter.candidates.device)

    def begin(self, row: int, first_token: int) -> None:
        """See ``Drafting``."""

    def observe(self, tokens: Tensor, best: Tensor) -> None:
        """See ``Drafting``. Of a token that was read several times the last one counts."""
        order = tokens.flatten().argsort(stable=True)
        known = tokens.flatten()[order]
        place = torch.arange(len(known), device=known.device)
        final = torch.cat([known[1:] != known[:-1], torch.ones_like(known[:1], dtype=torch.bool)])
        # All places of a token write what its last one does: which of them comes last does not matter then.
        newest = torch.where(final, place, len(known) - 1).flip(0).cummin(0).values.flip(0)
        self.drafter.candidates[known] = best.flatten(0, 1)[order[newest]]

    def advance(self, texts: Texts, tokens: Tensor, counts: Tensor, features: Features) -> None:
        """See ``Drafting``."""
        self.last[texts.first : texts.first + len(tokens)] = tokens.gather(1, counts[:, None] - 1)[:, 0]

    def draft(self, texts: Texts, shape: Shape | ForcedPath, sampling: Sampling, chance: Chance | None) -> DraftTrees:
        """See ``Drafting``. Raises UserError where a tree is to be measured: every answer changes the candidates."""
        if isinstance(shape, ForcedPath):
            mend = "decoding/shape=recycling_tree, static_tree or chain"
            raise UserError(f"a tree is not measured for token recycling, which learns as it decodes: expected {mend}")
        tree = _within(shape, self.top_tokens) if isinstance(shape, StaticTree) else StaticTree.chain(shape.depth)
        device = self.last.device
        level = self.last[: len(texts.lengths), None]  # [B, m]
        tokens, parents, first = [], list[int](), -1  # the number of the level's first node
        for branching in tree.branching:
            of_each = [(node, rank) for node, count in enumerate(branching) for rank in range(count)]
            chosen = _constant(tuple(node * self.top_tokens + rank for node, rank in of_each), device)
            parents += [first + node for node, _ in of_each]
            # What follows the unknown is looked up after token 0, and is as dead as the unknown itself.
            level = self.drafter.candidates[level.clamp(min=0)].flatten(1)[:, chosen]
            first = first + len(branching)
            tokens.append(level)
        found = torch.cat(tokens, dim=1)
        above = _constant(tuple(parents), device).expand_as(found)
        return DraftTrees(found.clamp(min=0), above, None, found >= 0, depth=tree.depth, width=tree.width)

    def drop(self, row: int, last: int, length: int) -> None:
        """See ``Drafting``."""
        self.last[row] = self.last[last]


@lru_cache(maxsize=64)
def _within(tree: StaticTree, top: int) -> StaticTree:
    """Its nodes of so many ranks."""
    return StaticTree(tuple(path for path in tree.paths if max(path) < top))


@lru_cache(maxsize=256)
def _constant(values: tuple[int, ...], device: torch.device) -> Tensor:
    """``[len(values)]``, copied to the device once and not in every round."""
    return torch.tensor(values, dtype=torch.int64, device=device)
