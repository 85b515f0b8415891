"""How often each rank of each drafted level is right, and the static tree that this makes best (Medusa, 2401.10774).

The target's greedy answers are drafted again, from every position and along the answer itself: what is asked of level d
is at which rank of the draft's order the answer's token lies, given that the levels above hold the answer. Any drafter
can be asked whose drafts are grown by ``draft_tree_builder.grow``."""

import math
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from specdraft.data.prompts import encode
from specdraft.data.sources.stdlib import PythonStdlib
from specdraft.decoding.decoder import Decoder
from specdraft.decoding.passes import Pass, Texts
from specdraft.decoding.sampling import Sampling
from specdraft.decoding.shapes import ForcedPath, StaticTree, tree_from_accuracies
from specdraft.errors import UserError

if TYPE_CHECKING:
    from specdraft.drafters.base import Drafter
    from specdraft.targets import Target

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
    texts = [[*prompt, *answer] for prompt, answer in answers]
    end = max(len(prompt) for prompt, _ in answers) + max(len(answer) for _, answer in answers)
    drafting, cache = drafter.drafting(len(answers), end + depth), target.new_cache(len(answers), end + depth)
    whole = [target.step(Pass.prompt(ids, target.device), cache, drafter.layers, row) for row, ids in enumerate(texts)]
    drafting.borrow(cache)
    lengths = torch.tensor([len(prompt) + 1 for prompt, _ in answers], device=target.device)
    longest = int(lengths.max())
    for row, (prompt, _) in enumerate(answers):  # the prompt, and the first token of the answer
        drafting.begin(row, prompt[0])
        told = torch.tensor([texts[row][1 : len(prompt) + 1]], device=target.device)
        features = type(whole[row])(*(part[:, : len(prompt)] for part in whole[row]))
        begun = Texts(torch.ones_like(lengths[:1]), 1, row)
        drafting.advance(begun, told, torch.full_like(lengths[:1], len(prompt)), features)
    # Beyond its end a text goes on with its last token, and nobody looks.
    ahead = pad_sequence([torch.tensor(text, device=target.device) for text in texts], batch_first=True)
    ahead = torch.nn.functional.pad(ahead, (0, longest + depth))
    states = type(whole[0])(*(_padded(parts, ahead.shape[1]) for parts in zip(*whole, strict=True)))
    found: list[list[Ranks]] = [[] for _ in answers]
    for emitted in range(1, max(len(answer) for _, answer in answers)):
        here = lengths[:, None] + torch.arange(depth, device=target.device)
        path = ahead.gather(1, here)
        drafts = drafting.draft(Texts(lengths, longest), ForcedPath(path, top), Sampling(), None)
        right = drafts.beneath(torch.ones_like(drafts.tokens, dtype=torch.bool))
        right &= drafts.tokens == path.gather(1, drafts.depths - 1)
        for row, (ranks, (_, answer)) in enumerate(zip(found, answers, strict=True)):
            if emitted < len(answer):
                node = right[row].nonzero()[:, 0]
                by_level = dict(zip(drafts.depths[row, node].tolist(), drafts.ranks[row, node].tolist(), strict=True))
                ranks.append(_until_wrong(by_level, min(depth, len(answer) - emitted)))
        if drafting.shares_cache:  # what it wrote there of its own stays behind the text
            last = ahead.gather(1, lengths[:, None] - 1)
            target.step(Pass.text(last, lengths - 1, longest - 1), cache)
        features = states.take(lengths[:, None] - 1)
        drafting.advance(Texts(lengths, longest), path[:, :1], torch.ones_like(lengths), features)
        lengths, longest = lengths + 1, longest + 1
    return found


def _padded(parts: Sequence[Tensor], length: int) -> Tensor:
    """Hidden states ``[1, T, ...]`` of several texts as ``[B, length, ...]``."""
    return torch.cat([torch.nn.functional.pad(part, (0, 0, 0, length - part.shape[1])) for part in parts])


def _until_wrong(by_level: Mapping[int, int], depth: int) -> Ranks:
    """Of each of ``depth`` levels the rank of the true token, up to the first that has none."""
    ranks: Ranks = []
    for level in range(1, depth + 1):
        ranks.append(by_level.get(level))
        if ranks[-1] is None:
            break
    return ranks
