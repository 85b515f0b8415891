"""Several sources as one, in given proportions."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from heapq import merge
from itertools import takewhile
from math import ceil

from specdraft.data.source import Conversation, Source, check_request
from specdraft.errors import UserError


@dataclass(frozen=True)
class Mixture:
    """Conversations of ``sources`` in proportion to ``weights``, name by name; nothing is repeated.

    The mixture ends where its first source does: from there on the proportions could not be kept.
    """

    sources: Mapping[str, Source]
    weights: Mapping[str, float]

    def __post_init__(self) -> None:
        """Raise UserError unless each source has a positive weight."""
        if not self.sources or set(self.sources) != set(self.weights) or min(self.weights.values()) <= 0:
            raise UserError(
                f"the mixture has the sources {sorted(self.sources)} and the weights {dict(self.weights)}: "
                "expected a positive weight for each source"
            )

    @property
    def name(self) -> str:
        """Sources and their shares."""
        total = sum(self.weights.values())
        return " + ".join(f"{self.weights[key] / total:.0%} {self.sources[key].name}" for key in self.sources)

    def conversations(self, split: str, limit: int | None = None) -> list[Conversation]:
        """The conversations of a split, in a fixed and fair order, at most ``limit``. Raises UserError."""
        check_request(split, limit)
        total = sum(self.weights.values())
        # The k-th conversation of a source with weight w stands at (k + 1/2) / w: every prefix keeps the proportions.
        placed, end = [], float("inf")
        for index, (key, source) in enumerate(self.sources.items()):
            weight = self.weights[key]
            wanted = None if limit is None else ceil(limit * weight / total) + 1
            found = source.conversations(split, wanted)
            if wanted is None or len(found) < wanted:
                end = min(end, (len(found) + 0.5) / weight)
            placed.append([((k + 0.5) / weight, index, replace(c, id=f"{key}:{c.id}")) for k, c in enumerate(found)])
        mixed = takewhile(lambda item: item[0] < end, merge(*placed, key=lambda item: item[:2]))
        return [conversation for _, _, conversation in mixed][:limit]
