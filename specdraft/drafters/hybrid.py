"""Retrieval, else a head: draft what a look-up finds where it finds enough, and what the head says elsewhere.

B = requests, N = nodes of a draft, V = vocabulary.

What an answer copies is cheaper looked up than predicted, and right for longer; what it does not copy only a head can
say. Which of the two drafts is decided before anything is drawn, by the text alone, so that every draft stays exact:
what was looked up is a point mass, what a head drew has its q."""

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import one_hot, pad

from specdraft.decoding.cache import StaticCache
from specdraft.decoding.grammar import Followed
from specdraft.decoding.interfaces import Drafting
from specdraft.decoding.passes import Riders, Texts
from specdraft.decoding.sampling import Chance, Sampling
from specdraft.decoding.shapes import ForcedPath, Shape, StaticTree
from specdraft.decoding.tree import DraftTrees
from specdraft.drafters.base import Drafter
from specdraft.drafters.text_drafter import TextDrafter, TextDrafting, chains
from specdraft.errors import UserError
from specdraft.targets import Features, Target


class Hybrid(Drafter):
    """Drafts of ``retrieval`` that have ``min_tokens`` tokens or more, else of ``head``."""

    rates_hold = False

    def __init__(self, head: Drafter, retrieval: Drafter, min_tokens: int = 2) -> None:
        """Raises UserError for a retrieval that looks at more than the text, and fewer than 1 token."""
        super().__init__()
        if not isinstance(retrieval, TextDrafter):
            wanted = "one that looks at the text alone: prompt_lookup, suffix or ngram_cache"
            raise UserError(f"retrieval is {retrieval.family}: expected {wanted}")
        if min_tokens < 1:
            raise UserError(f"a hybrid's min_tokens is {min_tokens}: expected at least 1 token that was looked up")
        self.head, self.retrieval, self.min_tokens = head, retrieval, min_tokens
        self.layers, self.quantization, self.branches = head.layers, head.quantization, head.branches
        self.reads_text_alone = head.reads_text_alone and retrieval.reads_text_alone

    def bind(self, target: Target) -> None:
        """See ``Drafter``."""
        super().bind(target)
        self.vocab_size = target.vocab_size
        self.head.bind(target)
        self.retrieval.bind(target)

    def num_places(self, shape: Shape) -> int:
        """See ``Drafter``."""
        return self.head.num_places(shape)

    def forget(self) -> None:
        """See ``Drafter``."""
        self.head.forget()
        self.retrieval.forget()

    def drafting(self, rows: int, capacity: int) -> "HybridDrafting":
        """See ``Drafter``."""
        return HybridDrafting(self, rows, capacity)


class HybridDrafting(Drafting):
    """What both keep of each request. Both are told all that is emitted, so that either may draft next."""

    def __init__(self, drafter: Hybrid, rows: int, capacity: int) -> None:
        self.drafter = drafter
        self.head = drafter.head.drafting(rows, capacity)
        self.retrieval = TextDrafting(drafter.retrieval, rows)
        self.top_tokens, self.shares_cache = self.head.top_tokens, self.head.shares_cache

    def borrow(self, cache: StaticCache) -> None:
        """See ``Drafting``."""
        self.head.borrow(cache)

    def constrain(self, grammar: Followed) -> None:
        """See ``Drafting``."""
        self.head.constrain(grammar)

    def observe(self, tokens: Tensor, best: Tensor) -> None:
        """See ``Drafting``."""
        self.head.observe(tokens, best)

    def num_read(self, shape: Shape) -> int:
        """See ``Drafting``."""
        return max(shape.num_nodes, self.head.num_read(shape))

    def ride(self, texts: Texts) -> Riders | None:
        """See ``Drafting``."""
        return self.head.ride(texts)

    def hear(self, logits: Tensor) -> None:
        """See ``Drafting``."""
        self.head.hear(logits)

    def begin(self, row: int, first_token: int) -> None:
        """See ``Drafting``."""
        self.head.begin(row, first_token)
        self.retrieval.begin(row, first_token)

    def advance(self, texts: Texts, tokens: Tensor, counts: Tensor, features: Features) -> None:
        """See ``Drafting``."""
        self.head.advance(texts, tokens, counts, features)
        self.retrieval.advance(texts, tokens, counts, features)

    def draft(self, texts: Texts, shape: Shape | ForcedPath, sampling: Sampling, chance: Chance | None) -> DraftTrees:
        """See ``Drafting``. The head drafts for all requests if one of them needs it, and else for none."""
        if isinstance(shape, ForcedPath):  # a question about the head's ranks: there are no others
            return self.head.draft(texts, shape, sampling, chance)
        found = self.retrieval.propose(len(texts.lengths), shape.depth)
        least = min(self.drafter.min_tokens, shape.depth)
        enough = [len(draft) >= least for draft in found]
        device = texts.lengths.device
        if not any(enough):
            return self.head.draft(texts, shape, sampling, chance)
        looked_up = chains([draft if use else [] for draft, use in zip(found, enough, strict=True)], device)
        if isinstance(shape, StaticTree) and shape.sampled and not sampling.greedy:
            # The head's drafts have a q: with one of their own these are given the same draws beside them and alone.
            looked_up = replace(looked_up, q=one_hot(looked_up.tokens, self.drafter.vocab_size).float())
        if all(enough):
            return looked_up
        drafted = self.head.draft(texts, shape, sampling, chance)
        return choose(torch.tensor(enough, device=device), looked_up, drafted)

    def drop(self, row: int, last: int, length: int) -> None:
        """See ``Drafting``."""
        self.head.drop(row, last, length)
        self.retrieval.drop(row, last, length)


def choose(first: Tensor, one: DraftTrees, other: DraftTrees) -> DraftTrees:
    """Of each request the tree of ``one`` if ``first`` (bool ``[B]``), else that of ``other``. Both have q, or none."""
    nodes = max(one.num_nodes, other.num_nodes)
    mine, theirs = _widened(one, nodes), _widened(other, nodes)
    tokens, parents, alive = (torch.where(first[:, None], *pair) for pair in zip(mine, theirs, strict=True))
    q = None
    if one.q is not None and other.q is not None:
        both = (pad(one.q, (0, 0, 0, nodes - one.num_nodes)), pad(other.q, (0, 0, 0, nodes - other.num_nodes)))
        q = torch.where(first[:, None, None], *both)
    depth, width = max(one.depth, other.depth), max(one.width, other.width)
    return DraftTrees(tokens, parents, q, alive, depth=depth, width=width)


def _widened(trees: DraftTrees, nodes: int) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, parents, alive ``[B, nodes]``; what is added is not alive, and follows one another, as in a chain."""
    more = nodes - trees.num_nodes
    alive = torch.ones_like(trees.tokens, dtype=torch.bool) if trees.alive is None else trees.alive
    added = torch.arange(trees.num_nodes - 1, nodes - 1, device=trees.tokens.device)
    parents = torch.cat([trees.parents, added.expand(len(trees.parents), -1)], dim=1)
    return pad(trees.tokens, (0, more)), parents, pad(alive, (0, more))
