"""Where a store's hidden states come from. ``conf/features/*.yaml`` mirrors the constructors."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

from specdraft.targets import Capture, Target


class FeatureSource(Protocol):
    """A way to compute hidden states."""

    def open(self, target: Target, layers: Sequence[int], sequence_length: int) -> AbstractContextManager[Capture]:
        """Inside the block, compute the features of packed sequences of up to ``sequence_length`` tokens."""


class InProcess(FeatureSource):
    """The target of this process: the default, and what the others are compared with."""

    @contextmanager
    def open(self, target: Target, layers: Sequence[int], sequence_length: int) -> Iterator[Capture]:
        """Nothing has to be opened."""
        yield lambda ids, positions: target.features(ids.to(target.device), positions.to(target.device), layers)
