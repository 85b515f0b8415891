"""One request of a drafter, told and asked as the decode loop does it, and what is read for it."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from specdraft.decoding.passes import Texts
from specdraft.decoding.sampling import Chance, Sampling
from specdraft.decoding.shapes import ForcedPath, Shape
from specdraft.decoding.tree import DraftTrees
from specdraft.drafters.base import Drafter
from specdraft.drafters.draft_tree_builder import Level

GREEDY = Sampling()


class Alone:
    """A request in the only row of ``drafting``. length: tokens of its text. read: of the last draft, every level that
    was read and the logits after it; None stands for the emitted text."""

    def __init__(self, drafter: Drafter, first_token: int, capacity: int = 64) -> None:
        self.drafting: Any = drafter.drafting(1, capacity)
        self.drafting.begin(0, first_token)
        self.length = 1
        self.read: list[tuple[Level | None, Tensor]] = []
        for name in ("first", "extend"):
            if hasattr(self.drafting, name):
                setattr(self.drafting, name, self._noting(getattr(self.drafting, name)))

    @property
    def texts(self) -> Texts:
        return Texts(torch.tensor([self.length]), self.length)

    @torch.inference_mode()
    def advance(self, tokens: Tensor, features: Any = None) -> None:
        """Emit all of ``tokens [n]``."""
        self.drafting.advance(self.texts, tokens[None], torch.tensor([len(tokens)]), features)
        self.length += len(tokens)

    @torch.inference_mode()
    def draft(self, shape: Shape | ForcedPath, sampling: Sampling = GREEDY, seed: int = 0) -> DraftTrees:
        self.read.clear()
        chance = Chance(torch.tensor([Chance.mixed(seed)]), torch.tensor([self.length]))
        return self.drafting.draft(self.texts, shape, sampling, chance)

    @torch.inference_mode()
    def along(self, path: Sequence[int]) -> Tensor:
        """The logits ``[len(path) + 1, Vd]`` of a draft that is made to follow ``path``."""
        logits = [self.drafting.first(self.texts)]
        for depth, token in enumerate(path, start=1):
            level = Level(torch.tensor([[token]]), torch.tensor([[0]]), depth, depth - 1, None)
            logits.append(self.drafting.extend(self.texts, level)[:, 0])
        return torch.cat(logits)

    def _noting(self, function: Any) -> Any:
        def noted(texts: Texts, level: Level | None = None) -> Tensor:
            logits = function(texts) if level is None else function(texts, level)
            self.read.append((level, logits))
            return logits

        return noted
