"""Several sources as one, in given proportions."""

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np

from specdraft.data.sources.base import Conversation, Selection, Source, check_request
from specdraft.data.sources.self_written import SelfWritten
from specdraft.errors import UserError


@dataclass(frozen=True)
class Mixture:
    """Conversations of ``sources`` in proportion to ``weights``, name by name; nothing is repeated.
    The mixture ends where its first source does: from there on the proportions could not be kept."""

    sources: Mapping[str, Source]
    weights: Mapping[str, float]

    def __post_init__(self) -> None:
        positive = all(isinstance(weight, int | float) and weight > 0 for weight in self.weights.values())
        if not self.sources or set(self.sources) != set(self.weights) or not positive:
            said = f"the mixture has the sources {sorted(self.sources)} and the weights {dict(self.weights)}"
            raise UserError(f"{said}: expected a positive weight for each source")

    @property
    def name(self) -> str:
        """Sources and their shares."""
        total = sum(self.weights.values())
        return " + ".join(f"{self.weights[key] / total:.0%} {self.sources[key].name}" for key in self.sources)

    @property
    def max_malformed(self) -> int:
        """As many as all sources together."""
        return sum(source.max_malformed for source in self.sources.values())

    def conversations(self, split: str, limit: int | None = None) -> Selection:
        """As ``Source`` says."""
        check_request(split, limit)
        keys, weights = list(self.sources), [self.weights[key] for key in self.sources]
        found = [_all(source, split, limit) for source in self.sources.values()]
        # The k-th conversation of a source with weight w stands at (k + 1/2) / w: every prefix keeps the proportions.
        at = np.concatenate([(np.arange(len(one)) + 0.5) / weight for one, weight in zip(found, weights, strict=True)])
        end = min((len(one) + 0.5) / weight for one, weight in zip(found, weights, strict=True))
        order = np.argsort(at, kind="stable")  # of equal places that of the earlier source is first
        order = order[at[order] < end][:limit]
        begins = [0, *accumulate(map(len, found))]

        def read(place: int) -> Conversation:
            index = bisect_right(begins, place) - 1
            conversation = found[index][place - begins[index]]
            return replace(conversation, id=f"{keys[index]}:{conversation.id}")

        return Selection(read, order, np.concatenate([one.digests for one in found])[order])


def _all(source: Source, split: str, limit: int | None) -> Selection:
    """All conversations of the source; of one without an end as many as the mixture may need."""
    return source.conversations(split, limit if isinstance(source, SelfWritten) else None)
