"""A drafter inside the real decode loop, whose drafts are noted with the text that each follows.

B = requests under way, n = drafted tokens, V = vocabulary.

The loop is made to accept what a check wants, none, some or all of a draft: it is handed the known answer with a wrong
token in it, whatever the drafter said. So requests grow at different paces, with the features, caches and rows that
serving has."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specdraft.decoding.decoder import Decoder
from specdraft.decoding.passes import Texts
from specdraft.decoding.sampling import Chance, Sampling
from specdraft.decoding.shapes import DynamicTree, Shape, StaticTree
from specdraft.decoding.tree import DraftTrees
from specdraft.drafters.base import Drafter
from specdraft.targets import Target

CHAIN = StaticTree.chain(4)
BUSH = StaticTree(((0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 1, 0), (1, 0, 0)))
SAMPLED = Sampling(1.0)
_ACCEPTED = (0, 3, 1, 4, 0, 2)  # of the drafts of a request, round by round


class Draft(NamedTuple):
    """What a request was given, and the ``text`` before it. tokens, parents: of the n nodes that there are. q:
    ``[n, V]``, None where tokens were chosen."""

    text: list[int]
    tokens: list[int]
    parents: list[int]
    q: Tensor | None

    def differs(self, other: "Draft", close: float) -> str | None:
        """What is not the same in another one, in words."""
        if self.text != other.text:
            return f"the text goes on as {other.text[-3:]} instead of {self.text[-3:]}"
        if (self.tokens, self.parents) != (other.tokens, other.parents):
            return f"after {len(self.text)} tokens {other.tokens} is drafted instead of {self.tokens}"
        if (self.q is None) != (other.q is None):
            return f"after {len(self.text)} tokens one draft has a q and the other has none"
        if self.q is not None and other.q is not None and (gap := (self.q - other.q).abs().max().item()) > close:
            return f"after {len(self.text)} tokens probabilities of the draft differ by {gap:.2g}"
        return None


@dataclass(frozen=True)
class Asked:
    """Who asks for a draft: the drafting, the texts that it follows and their numbers among the prompts."""

    drafting: Any
    texts: Texts
    numbers: list[int]

    def draft(self, shape: Any, sampling: Sampling) -> DraftTrees:
        """Of all requests, each with draws that depend on its number and the length of its text alone."""
        seeds = torch.tensor([Chance.mixed(number) for number in self.numbers], device=self.texts.lengths.device)
        trees: DraftTrees = self.drafting.draft(self.texts, shape, sampling, Chance(seeds, self.texts.lengths))
        return trees


Ask = Callable[[Asked, Shape], DraftTrees]
"""Drafts in the shape that is given, which is that of the recording without what lies beyond the context."""


@dataclass
class Recording:
    """A drafter in the decode loop. shape: of the drafts, which go on to the length that was trained. ask: how they are
    asked for, by default as ``sampling`` says. own: the loop is handed them and decodes as ``sampling`` says, instead
    of the answer, greedily. blind: the drafter is shown zeros for the target's hidden states. found: of each prompt its
    drafts."""

    drafter: Drafter
    target: Target
    shape: Shape = CHAIN
    sampling: Sampling = SAMPLED
    ask: Ask | None = None
    own: bool = False
    blind: bool = False

    def __post_init__(self) -> None:
        self.shape = _as_trained(self.shape, self.drafter.whole_drafts)
        self.found: list[list[Draft]] = []
        self.answers: list[list[int]] = []
        self.drafter.forget()
        self.drafter.bind(self.target)

    def run(self, prompts: Sequence[Sequence[int]], new_tokens: int = 14, batch_size: int = 1) -> list[list[Draft]]:
        """The drafts of each prompt."""
        decoder = Decoder(self.target)
        if not self.own:
            known = {tuple(prompt): decoder.generate(prompt, new_tokens).tokens for prompt in set(map(tuple, prompts))}
            self.answers = [[*prompt, *known[tuple(prompt)]] for prompt in prompts]
        self.found = [[] for _ in prompts]
        sampling = self.sampling if self.own else Sampling()
        watched: Any = _Watched(self)
        found = Decoder(self.target, watched, self.shape, sampling).generate_batch(prompts, new_tokens, batch_size)
        if self.own:
            self.answers = [[*prompt, *each.tokens] for prompt, each in zip(prompts, found, strict=True)]
        return self.found


class _Watched:
    """Stands for the drafter before the loop."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording

    def __getattr__(self, name: str) -> Any:
        return getattr(self._recording.drafter, name)

    def drafting(self, rows: int, capacity: int) -> "_WatchedDrafting":
        return _WatchedDrafting(self._recording, self._recording.drafter.drafting(rows, capacity))


class _WatchedDrafting:
    """Stands for its drafting; knows the text of every row."""

    def __init__(self, recording: Recording, inner: Any) -> None:
        self._recording, self._inner = recording, inner
        self._rows: dict[int, int] = {}  # number of the prompt in each row
        self._texts: list[list[int]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def begin(self, row: int, first_token: int) -> None:
        self._rows[row] = len(self._texts)
        self._texts.append([int(first_token)])
        self._inner.begin(row, first_token)

    def advance(self, texts: Texts, tokens: Tensor, counts: Tensor, features: Any) -> None:
        for index, count in enumerate(counts.tolist()):
            self._texts[self._rows[texts.first + index]] += tokens[index, :count].tolist()
        if self._recording.blind:
            features = type(features)(*(torch.zeros_like(part) for part in features))
        self._inner.advance(texts, tokens, counts, features)

    def drop(self, row: int, last: int, length: int) -> None:
        self._rows[row] = self._rows[last]
        self._inner.drop(row, last, length)

    def draft(self, texts: Texts, shape: Shape, sampling: Sampling, chance: Chance | None) -> DraftTrees:
        recording = self._recording
        numbers = [self._rows[texts.first + index] for index in range(len(texts.lengths))]
        if recording.own:
            trees: DraftTrees = self._inner.draft(texts, shape, sampling, chance)
        else:
            asked = Asked(self._inner, texts, numbers)
            trees = recording.ask(asked, shape) if recording.ask else asked.draft(shape, recording.sampling)
        there = trees.beneath(torch.ones_like(trees.tokens, dtype=torch.bool))
        for row, number in enumerate(numbers):
            kept = there[row]
            parents = _renumbered(trees.parents[row], kept)
            q = None if trees.q is None else trees.q[row, kept].cpu()
            draft = Draft(list(self._texts[number]), trees.tokens[row, kept].tolist(), parents, q)
            recording.found[number].append(draft)
        return trees if recording.own else self._known(numbers, shape.depth, texts.lengths.device)

    def _known(self, numbers: list[int], depth: int, device: torch.device) -> DraftTrees:
        """The answers, each with a wrong token where its draft is to be rejected."""
        rows = []
        for number in numbers:
            length, rounds = len(self._texts[number]), len(self._recording.found[number])
            row = (self._recording.answers[number][length:] + [0] * depth)[:depth]
            accepted = _ACCEPTED[(rounds + number) % len(_ACCEPTED)]
            if accepted < depth:
                row[accepted] = (row[accepted] + 1) % self._recording.target.vocab_size
            rows.append(row)
        return DraftTrees.chains(torch.tensor(rows, device=device))


def _as_trained(shape: Shape, levels: int | None) -> Shape:
    """A shape with so many levels, where they matter."""
    if levels is None or levels <= shape.depth:
        return shape
    if isinstance(shape, DynamicTree):
        return replace(shape, depth=levels)
    return replace(shape, paths=(*shape.paths, *((0,) * depth for depth in range(shape.depth + 1, levels + 1))))


def _renumbered(parents: Tensor, kept: Tensor) -> list[int]:
    """The parents of the nodes that are kept, as indices into those; -1 is the root."""
    places = (kept.cumsum(0) - 1).tolist()
    return [places[parent] if parent >= 0 else -1 for parent in parents[kept].tolist()]


def compare(one: list[list[Draft]], other: list[list[Draft]], close: float) -> str | None:
    """The first difference between the drafts of the same prompts, in words."""
    for number, (mine, others) in enumerate(zip(one, other, strict=True)):
        for expected, found in zip(mine, others, strict=False):
            if said := expected.differs(found, close):
                return f"of request {number + 1}, {said}"
        if len(mine) != len(others):
            return f"request {number + 1} is drafted for {len(others)} times instead of {len(mine)}"
    return None


def count(drafts: list[list[Draft]]) -> int:
    """How many drafts there are that have a token."""
    return sum(bool(draft.tokens) for each in drafts for draft in each)
