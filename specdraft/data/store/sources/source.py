"""What the store's command asks of a source. ``conf/features/*.yaml`` mirrors the constructors."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager

from specdraft.data.store.writer import Capture
from specdraft.targets import Target


class FeatureSource(ABC):
    """A way to compute hidden states."""

    @abstractmethod
    def open(self, target: Target, layers: Sequence[int], row_length: int) -> AbstractContextManager[Capture]:
        """What computes the features of packed rows of up to ``row_length`` tokens, for as long as the block lasts."""
