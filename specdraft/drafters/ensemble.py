"""An ensemble: several drafters draft for the same text, and the target verifies their merged trees (SpecInfer,
2305.09781).

B = requests, n = the most tokens that one of them emitted, a = auxiliary layers, H = hidden size.

What one member misses another may have. Each drafts the whole shape, with chance of its own, so that what it draws says
nothing of what the others drew; ``decoding/merging.py`` merges. Members may be trained independently, or each on what
the earlier ones miss (``train.py boost=``)."""

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn

from specdraft.decoding.cache import StaticCache
from specdraft.decoding.grammar import Followed
from specdraft.decoding.interfaces import Drafting
from specdraft.decoding.merging import merge
from specdraft.decoding.passes import Texts
from specdraft.decoding.sampling import Chance, Sampling
from specdraft.decoding.shapes import ForcedPath, Shape, StaticTree
from specdraft.decoding.tree import DraftTrees
from specdraft.drafters.base import Drafter
from specdraft.drafters.drafting import LevelDrafting
from specdraft.drafters.jacobi import Jacobi
from specdraft.drafters.lookahead import Lookahead
from specdraft.errors import UserError
from specdraft.targets import Features, Target


class Ensemble(Drafter):
    """The drafts of all ``members``, merged. Where a token was drafted twice the first member's is tried first."""

    rates_hold = False
    branches = True

    def __init__(self, members: Sequence[Drafter]) -> None:
        """Raises UserError for fewer than 2 members, and for one that looks for its own chain in the target's pass."""
        super().__init__()
        if len(members) < 2:
            wanted = "at least 2, as by 'checkpoint=[PATH,PATH]' or drafter@ensemble=NAME"
            raise UserError(f"an ensemble with {len(members)} drafter: expected {wanted}")
        if alone := [member.family for member in members if isinstance(member, Jacobi | Lookahead)]:
            wanted = "other drafters; it learns from a pass that reads what it laid out, and no other's drafts"
            raise UserError(f"{alone[0]} cannot draft in an ensemble: expected {wanted}")
        self._members = nn.ModuleList(members)
        self.layers = tuple(sorted({layer for member in members for layer in member.layers}))
        schemes = {member.quantization: None for member in members if next(member.parameters(), None) is not None}
        self.quantization = " and ".join(str(each) for each in schemes) if any(schemes) else None

    @property
    def members(self) -> list[Drafter]:
        """In the order in which their tokens are tried."""
        return cast("list[Drafter]", list(self._members))

    @property
    def draws(self) -> bool:
        """See ``Drafter``."""
        return any(member.draws for member in self.members)

    def bind(self, target: Target) -> None:
        """See ``Drafter``."""
        super().bind(target)
        for member in self.members:
            member.bind(target)

    def num_places(self, shape: Shape) -> int:
        """See ``Drafter``."""
        return sum(member.num_places(shape) for member in self.members)

    def forget(self) -> None:
        """See ``Drafter``."""
        for member in self.members:
            member.forget()

    def drafting(self, rows: int, capacity: int) -> "EnsembleDrafting":
        """See ``Drafter``. Raises UserError for a member that drafts tokens of another vocabulary."""
        return EnsembleDrafting(self, rows, capacity)


class EnsembleDrafting(Drafting):
    """What the members keep of each request. All are told all that is emitted, and all are shown the whole pass."""

    def __init__(self, drafter: Ensemble, rows: int, capacity: int) -> None:
        assert drafter.target is not None
        self.drafter, self.vocab_size = drafter, drafter.target.vocab_size
        self.members = [member.drafting(rows, capacity) for member in drafter.members]
        for member, drafting in zip(drafter.members, self.members, strict=True):
            if isinstance(drafting, LevelDrafting) and drafting.vocabulary.size != self.vocab_size:
                given = f"{member.family} drafts from a vocabulary of {drafting.vocabulary.size} tokens"
                raise UserError(f"{given} in an ensemble: expected the target's, of {self.vocab_size}")
        self.top_tokens = max(member.top_tokens for member in self.members)
        self.shares_cache = any(member.shares_cache for member in self.members)

    def borrow(self, cache: StaticCache) -> None:
        """See ``Drafting``."""
        for member in self.members:
            member.borrow(cache)

    def constrain(self, grammar: Followed) -> None:
        """See ``Drafting``."""
        for member in self.members:
            member.constrain(grammar)

    def num_read(self, shape: Shape) -> int:
        """See ``Drafting``."""
        return sum(member.num_read(shape) for member in self.members)

    def observe(self, tokens: Tensor, best: Tensor) -> None:
        """See ``Drafting``. Each is shown as many of the most likely tokens as it asks for."""
        for member in self.members:
            if member.top_tokens:
                member.observe(tokens, best[..., : member.top_tokens])

    def begin(self, row: int, first_token: int) -> None:
        """See ``Drafting``."""
        for member in self.members:
            member.begin(row, first_token)

    def advance(self, texts: Texts, tokens: Tensor, counts: Tensor, features: Features) -> None:
        """See ``Drafting``. Each is given the auxiliary hidden states of its own layers."""
        for member, drafting in zip(self.drafter.members, self.members, strict=True):
            own = of_layers(features, self.drafter.layers, member.layers)
            drafting.advance(texts, tokens, counts, own)

    def draft(self, texts: Texts, shape: Shape | ForcedPath, sampling: Sampling, chance: Chance | None) -> DraftTrees:
        """See ``Drafting``. Raises UserError where a tree is to be measured: the ranks of several are no ranks."""
        if isinstance(shape, ForcedPath):
            mend = "decoding/shape=chain, static_tree or dynamic_tree"
            raise UserError(f"a tree cannot be measured for an ensemble, each of whose members drafts one: use {mend}")
        drafts = []
        for number, member in enumerate(self.members):
            own = None if chance is None else chance.apart(number)
            drafts.append(member.draft(texts, shape, sampling, own))
        drawn = isinstance(shape, StaticTree) and shape.sampled and not sampling.greedy and self.drafter.draws
        return merge(drafts, self.vocab_size if drawn else None)

    def drop(self, row: int, last: int, length: int) -> None:
        """See ``Drafting``."""
        for member in self.members:
            member.drop(row, last, length)


def of_layers(features: Features, layers: Sequence[int], own: Sequence[int]) -> Features:
    """Of features with the auxiliary hidden states of ``layers``, ``[B, n, a*H]``, those of some of them."""
    if tuple(own) == tuple(layers):
        return features
    states = dict(zip(layers, features.aux.split(features.last.shape[-1], dim=-1), strict=True))
    aux = torch.cat([states[layer] for layer in own], dim=-1) if own else features.aux[..., :0]
    return Features(aux, features.last)
