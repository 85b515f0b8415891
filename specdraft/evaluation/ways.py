"""The ways of drafting that an evaluation compares."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from specdraft.decoding.shapes import Shape, StaticTree
from specdraft.evaluation.settings import drafted
from specdraft.export.engine import GREEDY, SAMPLED

if TYPE_CHECKING:
    from specdraft.drafters.base import Drafter


@dataclass(frozen=True)
class Way:
    """A way of drafting: a drafter under its name, a shape. beside: only for comparison with what is evaluated."""

    name: str
    drafter: "Drafter"
    shape: Shape
    beside: bool = False

    @property
    def drafting(self) -> str:
        """Of this shape: sampled, or greedy."""
        return SAMPLED if isinstance(self.shape, StaticTree) and self.shape.sampled else GREEDY


def ways_of(drafters: "Mapping[str, Drafter]", shape: Shape, draftings: Sequence[str]) -> Iterator[Way]:
    """The first drafting with every drafter, then the other ones with those that it makes a difference to."""
    for beside, drafting in enumerate(draftings):
        for name, drafter in drafters.items():
            if not beside or (drafter.draws and isinstance(shape, StaticTree)):
                yield Way(name, drafter, drafted(shape, drafting if drafter.draws else GREEDY), bool(beside))
