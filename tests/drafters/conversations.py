"""Texts that grow side by side, and what a drafter is told of them, as the decode loop tells it."""

import torch

from specdraft.decoding.passes import Texts
from specdraft.decoding.sampling import Chance, Sampling
from specdraft.decoding.shapes import ForcedPath
from specdraft.drafters.base import Drafter
from specdraft.targets import Features
from tests.families import V

LENGTHS = [9, 2, 5, 1]  # of the prompts


class Conversations:
    """Random texts that grow side by side, one of which may end and another take its row."""

    def __init__(self, drafter: Drafter, numbers: list[int], capacity: int = 64) -> None:
        """Of the texts ``LENGTHS`` those of these numbers, which are the same whatever others there are."""
        self.target, self.layers = drafter.target, drafter.layers
        self.drafting = drafter.drafting(len(numbers), capacity)
        self.numbers: list[int] = []
        self.texts: dict[int, list[int]] = {}
        for number in numbers:
            self.begin(number)

    def word(self, number: int, place: int) -> int:
        return int(torch.randint(V, (), generator=torch.Generator().manual_seed(1000 * number + place)))

    def begin(self, number: int) -> None:
        """A request: its prompt, and one emitted token."""
        row, length = len(self.numbers), LENGTHS[number] + 1
        self.numbers.append(number)
        text = self.texts[number] = [self.word(number, place) for place in range(length)]
        self.drafting.begin(row, text[0])
        one = torch.ones(1, dtype=torch.int64)
        told = torch.tensor([text[1:]])
        self.drafting.advance(Texts(one, 1, row), told, one * (length - 1), self.features(text, 1, length))

    def features(self, text: list[int], start: int, end: int) -> Features:
        """Of the positions before each of ``text[start:end]``."""
        known = self.target.features(torch.tensor([text[:-1]]), torch.arange(len(text) - 1)[None], self.layers)
        return Features(*(part[:, start - 1 : end - 1] for part in known))

    @property
    def lengths(self) -> torch.Tensor:
        return torch.tensor([len(self.texts[number]) for number in self.numbers])

    @property
    def now(self) -> Texts:
        return Texts(self.lengths, int(self.lengths.max()))

    def emit(self, counts: dict[int, int]) -> None:
        """Every text goes on by as many tokens; what is told of the shorter ones is padded."""
        texts, most = self.now, max(counts[number] for number in self.numbers)
        tokens, features = torch.zeros((len(self.numbers), most), dtype=torch.int64), []
        for row, number in enumerate(self.numbers):
            text, start = self.texts[number], len(self.texts[number])
            text += [self.word(number, place) for place in range(start, start + counts[number])]
            tokens[row, : counts[number]] = torch.tensor(text[start:])
            part = self.features(text, start, len(text))
            features.append([torch.nn.functional.pad(x, (0, 0, 0, most - x.shape[1]), value=9.0) for x in part])
        together = Features(*(torch.cat(parts) for parts in zip(*features, strict=True)))
        self.drafting.advance(texts, tokens, torch.tensor([counts[n] for n in self.numbers]), together)

    def draft(self, shape, sampling: Sampling) -> dict[int, tuple]:
        """What every request is given, by its number: tokens, parents and q of the nodes that there are."""
        if isinstance(shape, ForcedPath):
            shape = ForcedPath(shape.tokens[self.numbers], shape.top_k)
        chance = Chance(torch.tensor([Chance.mixed(number) for number in self.numbers]), self.lengths)
        trees = self.drafting.draft(self.now, shape, sampling, chance)
        parts = (trees.tokens, trees.parents, trees.q, trees.beneath(torch.ones_like(trees.tokens, dtype=torch.bool)))
        found = {}
        for row, number in enumerate(self.numbers):
            there = parts[3][row]
            tokens, parents, q = (None if part is None else part[row][there] for part in parts[:3])
            found[number] = tokens, parents, q
        return found

    def drop(self, number: int) -> None:
        row, last = self.numbers.index(number), len(self.numbers) - 1
        self.drafting.drop(row, last, len(self.texts[self.numbers[last]]))
        self.numbers[row] = self.numbers[last]
        self.numbers.pop()
