"""How often each rank of each drafted level is right, and the static tree that this makes best (Medusa, 2401.10774).

The target's greedy answers are drafted again, from every position and along the answer itself: what is asked of level d
is at which rank of the draft's order the answer's token lies, given that the levels above hold the answer. Any drafter
that can draft a static tree can be asked."""

import math
from collections.abc import Sequence
from itertools import chain
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from specdraft.data.prompts import encode
from specdraft.data.sources.stdlib import PythonStdlib
from specdraft.decoding.decoder import Decoder
from specdraft.decoding.sampling import Sampling
from specdraft.decoding.shapes import StaticTree, tree_from_accuracies
from specdraft.decoding.tree import ROOT, DraftTree
from specdraft.errors import UserError

if TYPE_CHECKING:
    from specdraft.drafters.base import Drafter
    from specdraft.targets import Features, Target

Answer = tuple[Sequence[int], Sequence[int]]
"""Token ids of a prompt, and of the target's greedy answer."""

Ranks = list[int | None]

_SIDE_BY_SIDE = 8  # answers that are drafted again together


def measured_tree(
    drafter: "Drafter",
    target: "Target",
    num_nodes: int,
    depth: int,
    top_k: int,
    limit: int = 16,
    max_new_tokens: int = 64,
) -> StaticTree:
    """The best static tree of ``num_nodes`` nodes for this drafter, of ``depth`` levels and ``top_k`` ranks at most.
    Measured on validation prompts of the standard library, which no evaluation decodes."""
    prompts = [encode(target.tokenizer, c.prompt_messages) for c in PythonStdlib().prompts("validation", limit)]
    fitting = [prompt for prompt in prompts if len(prompt) < target.max_length]
    decoder = Decoder(target)
    answers = [(prompt, decoder.generate(prompt, max_new_tokens).tokens) for prompt in fitting]
    accuracies = rank_accuracies(draft_ranks(drafter, target, answers, depth, top_k), depth, top_k)
    return tree_from_accuracies(accuracies, num_nodes)


@torch.inference_mode()
def draft_ranks(
    drafter: "Drafter", target: "Target", answers: Sequence[Answer], depth: int, top: int
) -> list[list[Ranks]]:
    """Of every answer, at every token from its second on, the ranks of the answer's tokens in the draft made there.
    Ranks go as deep as they are below ``top``; the first that is not is None and the last. Near the end of an answer
    they stop with it."""
    drafter.bind(target)
    found: list[list[Ranks]] = []
    for first in range(0, len(answers), _SIDE_BY_SIDE):
        found += _ranks_of(drafter, target, answers[first : first + _SIDE_BY_SIDE], depth, top)
    return found


def rank_accuracies(ranks: Sequence[Sequence[Ranks]], depth: int, top: int) -> list[list[float]]:
    """``[level][rank]``: of the drafts whose levels above were right, the share whose token of that rank is right too.
    ranks: as ``draft_ranks`` gives them. Levels below the last one that was ever right are left out, so a list may be
    shorter than ``depth``; the first level is always there. Raises UserError if there was nothing to draft."""
    hits = torch.zeros(depth, top, dtype=torch.int64)
    tried = torch.zeros(depth, 1, dtype=torch.int64)
    for row in chain.from_iterable(ranks):
        for level, rank in enumerate(row):
            tried[level] += 1
            if rank is not None:
                hits[level, rank] += 1
    if not tried[0]:
        why = "whose answers end with their first token or do not fit the target's context: expected answers to draft"
        raise UserError(f"a draft tree cannot be measured on {len(ranks)} prompts {why}")
    deepest = max(1, int((hits.sum(-1) > 0).sum()))
    return (hits[:deepest] / tried[:deepest]).tolist()


def replayed_acceptance_length(ranks: Sequence[Sequence[Ranks]], tree: StaticTree) -> float:
    """The acceptance length of greedy decoding with ``tree``: its rounds, replayed on the ranks of ``draft_ranks``.
    Rounds begin where the one before ended, hence more often where drafts fail than rates over all positions would say.
    A round that the end of an answer cuts short is left out. NaN without any round."""
    paths = set(tree.paths)
    inner = {path[:-1] for path in paths}
    rounds = accepted = 0
    for rows in ranks:
        place = 0
        while place < len(rows):
            path: tuple[int, ...] = ()
            for rank in rows[place]:
                if rank is None or (*path, rank) not in paths:
                    break
                path = (*path, rank)
            else:
                if path in inner:  # cut short
                    break
            rounds += 1
            accepted += len(path)
            place += len(path) + 1
    return 1 + accepted / rounds if rounds else math.nan


def _ranks_of(
    drafter: "Drafter", target: "Target", answers: Sequence[Answer], depth: int, top: int
) -> list[list[Ranks]]:
    retold = [ReplayedAnswer(drafter, target, answer, depth * top) for answer in answers]
    for emitted in range(1, max(len(answer) for _, answer in answers)):
        here = [each for each in retold if emitted < len(each.answer)]
        tokens, features = zip(*(each.advance(emitted) for each in here), strict=True)
        drafter.advance_batch([each.state for each in here], tokens, features)
        searches = [(each, _Search(each.answer[emitted : emitted + depth], top)) for each in here]
        while asking := [(each.state, search) for each, search in searches if not search.done]:
            states, shapes = [state for state, _ in asking], [search.shape for _, search in asking]
            drafts = drafter.draft_batch(states, shapes, Sampling(), [None] * len(asking))
            for (_, search), draft in zip(asking, drafts, strict=True):
                search.read(draft)
        for each, search in searches:
            each.ranks.append(search.ranks)
    return [each.ranks for each in retold]


class ReplayedAnswer:
    """An answer that is emitted once more, token by token, to a drafter. ranks: found so far, of every token."""

    def __init__(self, drafter: "Drafter", target: "Target", answer: Answer, room: int) -> None:
        self.prompt, self.answer = answer
        self._text = torch.tensor([*self.prompt, *self.answer], device=target.device)
        self._features = target.step(self._text[None], target.new_cache(len(self._text)), drafter.layers)
        self._read = 0
        self.state = drafter.start(self.prompt[0], len(self._text) + room)
        self.ranks: list[Ranks] = []

    def advance(self, emitted: int) -> "tuple[Tensor, Features]":
        """What the drafter has yet to be told when ``emitted`` tokens of the answer are known."""
        unread = slice(self._read, len(self.prompt) + emitted - 1)
        self._read = unread.stop
        features = type(self._features)(*(part[:, unread] for part in self._features))
        return self._text[unread.start + 1 : unread.stop + 1], features


class _Search:
    """At every level the rank of the true token among the ``top`` likeliest, until one is not among them (None)."""

    def __init__(self, truth: Sequence[int], top: int) -> None:
        self.truth, self.top = truth, top
        self.ranks: Ranks = []

    @property
    def done(self) -> bool:
        return len(self.ranks) == len(self.truth) or None in self.ranks

    @property
    def shape(self) -> StaticTree:
        """What to draft next: at every level the ``top`` likeliest children of the node on the path.
        The likeliest continuation is the best guess of the ranks still unknown; where it fails the rest is redrafted.
        """
        path = self._guess()
        return StaticTree(tuple((*path[:level], rank) for level in range(len(path)) for rank in range(self.top)))

    def read(self, draft: DraftTree) -> None:
        """Learn from a draft of ``shape``, as far as the guess was right."""
        tokens, here, guess = draft.tokens.tolist(), ROOT, self._guess()
        for level, wanted in enumerate(self.truth):
            below = draft.children.get(here, [])
            if level == len(self.ranks):
                rank = next((rank for rank, node in enumerate(below) if tokens[node] == wanted), None)
                self.ranks.append(rank)
                if rank != guess[level]:
                    return
            here = below[guess[level]]

    def _guess(self) -> list[int]:
        known = [rank for rank in self.ranks if rank is not None]
        return known + [0] * (len(self.truth) - len(known))
