"""Self-speculation: some of the target's own layers draft, with its norm, its head and its cache (training-free).

B = requests, n = the most tokens that one of them emitted, V = vocabulary.

The first layers alone, as LayerSkip drafts (2404.16710), or all but a chosen set (Draft & Verify, 2309.08168). What the
draft needs of the text stands in the target's cache already: the keys and values of the layers that it runs, made by
the whole target. Those of drafted tokens it writes there itself, behind the text, where verification writes again."""

from collections.abc import Sequence

import torch
from torch import Tensor

from specdraft.decoding.cache import StaticCache
from specdraft.decoding.passes import Texts
from specdraft.drafters.base import Drafter, constructor_arguments
from specdraft.drafters.draft_tree_builder import Vocabulary
from specdraft.drafters.drafting import ModelDrafting
from specdraft.drafters.layer_search import search_layers
from specdraft.errors import UserError
from specdraft.targets import Features, LanguageModel, Target
from specdraft.targets.partial import without_layers


class EarlyExit(Drafter):
    """Drafts by the first ``num_layers`` layers of the target (None: a third), or by all but ``skip_layers`` (numbers
    from 0; a number alone: so many, searched on the first prompt)."""

    def __init__(self, num_layers: int | None = None, skip_layers: int | Sequence[int] | None = None) -> None:
        """Raises UserError if both are given."""
        arguments = constructor_arguments(locals())
        super().__init__()
        if num_layers is not None and skip_layers is not None:
            given = f"num_layers={num_layers} and skip_layers={skip_layers}"
            raise UserError(f"early exit with {given}: expected one of them, and null for the other")
        self._arguments = arguments
        self.num_layers, self.skip_layers = num_layers, skip_layers
        self.model: LanguageModel | None = None  # the target without the skipped layers, once they are known

    @property
    def draws(self) -> bool:
        """With the target's parameters."""
        return True

    def bind(self, target: Target) -> None:
        """Leave out the layers of this target. Raises UserError for numbers that it has not, and if none is left."""
        if self.target is target:
            return
        super().bind(target)
        skipped = self._skipped(target.num_layers)
        self.model = None if skipped is None else without_layers(target, skipped)

    def _skipped(self, layers: int) -> set[int] | None:
        """Of a target of so many layers; None: they are to be searched."""
        if self.skip_layers is None:
            kept = max(1, layers // 3) if self.num_layers is None else self.num_layers
            if not 0 < kept < layers:
                raise UserError(
                    f"early exit with num_layers={kept}: expected 1 to {layers - 1} of the target's {layers}"
                )
            return set(range(kept, layers))
        if isinstance(self.skip_layers, int):
            if not 0 < self.skip_layers < layers:
                wanted = f"how many, 1 to {layers - 1}, or their numbers"
                raise UserError(f"early exit with skip_layers={self.skip_layers}: expected {wanted}")
            return None
        skipped = set(self.skip_layers)
        if not skipped < set(range(layers)):
            wanted = f"some numbers from 0 to {layers - 1}, but not all of them"
            raise UserError(f"early exit with skip_layers={list(self.skip_layers)}: expected {wanted}")
        return skipped

    def settle(self, prompt: Tensor) -> LanguageModel:
        """What drafts; the layers to skip are searched on the ``prompt [T]`` if nobody has said which."""
        assert self.target is not None
        if self.model is None:
            assert isinstance(self.skip_layers, int)
            self.model = without_layers(self.target, search_layers(self.target, self.skip_layers, prompt))
        return self.model

    def drafting(self, rows: int, capacity: int) -> "EarlyExitDrafting":
        """See ``Drafter``."""
        return EarlyExitDrafting(self, rows)


class EarlyExitDrafting(ModelDrafting):
    """The last emitted token of each request ``[rows]``, which the target has not read yet."""

    shares_cache = True
    unread: Tensor

    def __init__(self, drafter: EarlyExit, rows: int) -> None:
        assert drafter.target is not None
        self.drafter, self.vocabulary = drafter, Vocabulary(drafter.target.vocab_size)
        self.unread = torch.zeros(rows, dtype=torch.int64, device=drafter.target.device)
        self._begun: dict[int, int] = {}  # first tokens of prompts that are not known yet, by row

    def borrow(self, cache: StaticCache) -> None:
        """See ``Drafting``."""
        self.cache = cache

    def begin(self, row: int, first_token: int) -> None:
        """See ``Drafting``."""
        self._begun[row] = first_token

    def advance(self, texts: Texts, tokens: Tensor, counts: Tensor, features: Features) -> None:
        """See ``Drafting``."""
        if texts.first in self._begun:
            first = torch.full_like(tokens[0, :1], self._begun.pop(texts.first))
            self.model = self.drafter.settle(torch.cat([first, tokens[0]]))
        self.unread[texts.first : texts.first + len(tokens)] = tokens.gather(1, counts[:, None] - 1)[:, 0]

    @torch.inference_mode()
    def first(self, texts: Texts) -> Tensor:
        """See ``LevelDrafting``."""
        before = Texts(texts.lengths - 1, texts.longest - 1)
        return self.read(before, self.unread[: len(texts.lengths), None])[:, 0]

    def drop(self, row: int, last: int, length: int) -> None:
        """See ``Drafting``."""
        self.unread[row] = self.unread[last]
