"""The target of this process computes its hidden states itself."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor

from specdraft.data.store.sources.source import FeatureSource
from specdraft.targets import Capture, Features, Target


class InProcess(FeatureSource):
    """The default, and what the others are compared with."""

    @contextmanager
    def open(self, target: Target, layers: Sequence[int], row_length: int) -> Iterator[Capture]:
        """Nothing has to be opened."""

        def capture(input_ids: Tensor, position_ids: Tensor) -> Features:
            return target.features(input_ids.to(target.device), position_ids.to(target.device), layers)

        yield capture
