"""How often each rank of each drafted level is right, and the static tree that this makes best (Medusa, 2401.10774).

The target's greedy answers are drafted again, from every position and along the answer itself: what is asked of level d
is at which rank of the draft's order the answer's token lies, given that the levels above hold the answer. Any drafter
that can draft a static tree can be asked.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING

import torch

from specdraft.data.source import PythonStdlib
from specdraft.decoding.decoder import Decoder
from specdraft.decoding.sampling import Sampling
from specdraft.decoding.shapes import StaticTree, tree_from_accuracies
from specdraft.decoding.tree import ROOT
from specdraft.errors import UserError
from specdraft.evaluation.prompts import encode

if TYPE_CHECKING:
    from specdraft.drafters.base import Drafter
    from specdraft.targets import Target

Answer = tuple[Sequence[int], Sequence[int]]
"""Token ids of a prompt, and of the target's greedy answer."""

Ranks = list[int | None]


def measured_tree(
    drafter: "Drafter",
    target: "Target",
    num_nodes: int,
    depth: int,
    top_k: int,
    sampled: bool = True,
    limit: int = 16,
    max_new_tokens: int = 64,
) -> StaticTree:
    """The best static tree of ``num_nodes`` nodes for this drafter, of ``depth`` levels and ``top_k`` ranks at most.

    Measured on validation prompts of the standard library, which no evaluation decodes.
    """
    prompts = [encode(target.tokenizer, c.prompt_messages) for c in PythonStdlib().prompts("validation", limit)]
    fitting = [prompt for prompt in prompts if len(prompt) < target.max_length]
    decoder = Decoder(target)
    answers = [(prompt, decoder.generate(prompt, max_new_tokens).tokens) for prompt in fitting]
    accuracies = rank_accuracies(draft_ranks(drafter, target, answers, depth, top_k), depth, top_k)
    return replace(tree_from_accuracies(accuracies, num_nodes), sampled=sampled)


@torch.inference_mode()
def draft_ranks(
    drafter: "Drafter", target: "Target", answers: Sequence[Answer], depth: int, top: int
) -> list[list[Ranks]]:
    """Of every answer, at every token from its second on, the ranks of the answer's tokens in the draft made there.

    Ranks go as deep as they are below ``top``; the first that is not is None and the last. Near the end of an answer
    they stop with it.
    """
    drafter.bind(target)
    found = []
    for prompt, answer in answers:
        text = torch.tensor([[*prompt, *answer]], device=target.device)
        features = target.step(text, target.new_cache(text.shape[1]), drafter.layers)
        state = drafter.start(prompt[0], text.shape[1] + depth * top)
        read = 0
        rows = []
        for emitted in range(1, len(answer)):
            known = len(prompt) + emitted  # tokens that the drafter may know of
            unread = slice(read, known - 1)
            drafter.advance(state, text[0, read + 1 : known], type(features)(*(part[:, unread] for part in features)))
            read = known - 1
            rows.append(_ranks(drafter, state, answer[emitted : emitted + depth], top))
        found.append(rows)
    return found


def rank_accuracies(ranks: Sequence[Sequence[Ranks]], depth: int, top: int) -> list[list[float]]:
    """``[level][rank]``: of the drafts whose levels above were right, the share whose token of that rank is right too.

    ranks: as ``draft_ranks`` gives them. Levels below the last one that was ever right are left out, so a list may be
    shorter than ``depth``; the first level is always there. Raises UserError if there was nothing to draft.
    """
    hits = torch.zeros(depth, top, dtype=torch.int64)
    tried = torch.zeros(depth, 1, dtype=torch.int64)
    for row in chain.from_iterable(ranks):
        for level, rank in enumerate(row):
            tried[level] += 1
            if rank is not None:
                hits[level, rank] += 1
    if not tried[0]:
        raise UserError(
            f"a draft tree cannot be measured on {len(ranks)} prompts whose answers end with their first token or do "
            "not fit the target's context: expected answers to draft"
        )
    deepest = max(1, int((hits.sum(-1) > 0).sum()))
    return (hits[:deepest] / tried[:deepest]).tolist()


def replayed_acceptance_length(ranks: Sequence[Sequence[Ranks]], tree: StaticTree) -> float:
    """The acceptance length of greedy decoding with ``tree``: its rounds, replayed on the ranks of ``draft_ranks``.

    Rounds begin where the one before ended, hence more often where drafts fail than rates over all positions would say.
    A round that the end of an answer cuts short is left out. NaN without any round.
    """
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


def _ranks(drafter: "Drafter", state: object, truth: Sequence[int], top: int) -> Ranks:
    """At every level the rank of the true token among the ``top`` likeliest, until one is not among them (None)."""
    ranks: Ranks = []
    path: list[int] = []  # the true tokens' ranks as far as they are known
    while len(path) < len(truth):
        # The likeliest continuation is the best guess of the ranks still unknown; where it fails the rest is redrafted.
        guess = path + [0] * (len(truth) - len(path))
        tree = drafter.draft(state, _comb(guess, top), Sampling(), None)
        tokens, here = tree.tokens.tolist(), ROOT
        for level, wanted in enumerate(truth):
            below = tree.children.get(here, [])
            if level >= len(path):
                rank = next((rank for rank, node in enumerate(below) if tokens[node] == wanted), None)
                ranks.append(rank)
                if rank is None:
                    return ranks
                path.append(rank)
                if rank != guess[level]:
                    break
            here = below[path[level]]
    return ranks


def _comb(path: Sequence[int], top: int) -> StaticTree:
    """At every level the ``top`` likeliest children of the node on the path."""
    return StaticTree(tuple((*path[:level], rank) for level in range(len(path)) for rank in range(top)))
