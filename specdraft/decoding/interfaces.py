"""What the decode loop asks of a target and of a drafter; the classes themselves lie above this package."""

# ruff: noqa: D102  (methods are described where they are defined)

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from specdraft.decoding.cache import RewindableCache
from specdraft.decoding.sampling import Generators, Sampling
from specdraft.decoding.shapes import Shape
from specdraft.decoding.tree import DraftTree


class Features(Protocol):
    """Hidden states of a pass; see ``targets/language_model.py``."""

    @property
    def last(self) -> Tensor: ...
    def at(self, index: int, positions: Sequence[int]) -> Any: ...


class Target(Protocol):
    """See ``targets/language_model.py``."""

    max_length: int

    @property
    def device(self) -> torch.device: ...
    @property
    def eos_token_ids(self) -> frozenset[int]: ...
    @property
    def decoding_threads(self) -> int | None: ...
    def new_cache(self, capacity: int) -> RewindableCache: ...
    def step(
        self,
        input_ids: Tensor,
        cache: RewindableCache,
        layers: Sequence[int] = (),
        positions: Tensor | None = None,
        visible: Tensor | None = None,
    ) -> Features: ...
    def logits(self, last: Tensor) -> Tensor: ...


class Drafter(Protocol):
    """See ``drafters/base.py``."""

    @property
    def layers(self) -> tuple[int, ...]: ...
    def bind(self, target: Any) -> None: ...
    def start(self, first_token: int, max_length: int) -> Any: ...
    def advance(self, state: Any, tokens: Tensor, features: Any) -> None: ...
    def advance_batch(self, states: Sequence[Any], tokens: Sequence[Tensor], features: Sequence[Any]) -> None: ...
    def draft_batch(
        self, states: Sequence[Any], shapes: Sequence[Shape], sampling: Sampling, generators: Generators
    ) -> list[DraftTree]: ...
