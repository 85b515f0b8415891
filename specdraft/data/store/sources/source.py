"""What the store's command asks of a source. ``conf/features/*.yaml`` mirrors the constructors."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from specdraft.targets import Capture, Target


class FeatureSource(Protocol):
    """A way to compute hidden states."""

    def open(self, target: Target, layers: Sequence[int], row_length: int) -> AbstractContextManager[Capture]:
        """What computes the features of packed rows of up to ``row_length`` tokens, for as long as the block lasts."""
