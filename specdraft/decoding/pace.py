"""How long the drafts of a decoding go on, where a rule says so by what they are worth.

B = requests side by side, K = the most tokens drafted, Vd = draft vocabulary.

A level takes its time whether one request drafts it or all: all go on, or none. Before a round the rule tells from
earlier ones whether to draft at all. A drafter that grows its drafts from distributions is asked again before every
token: where it is surer than it usually is there, the token is taken to be right more often, and the other way round.
What is looked at is the distribution that a token would be drawn from, and those of the tokens before it, of all
requests: what is drawn is verified, and verification stays exact (``stopping.py``)."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specdraft.decoding.interfaces import Drafter
from specdraft.decoding.pacing import Goodput, Rounds, Weighed
from specdraft.decoding.shapes import Shape, StaticTree

_POWER = 0.6  # of the greatest probability, with which the chance of a token goes: found on replayed drafts
_UNSEEN = 4.0  # tokens that what the requests are sure of now counts, beside those that were judged


class Pace:
    """The lengths of a decoding's drafts, round by round; as a ``Stop``, of the draft that grows."""

    _weighed: Weighed  # of the round under way
    _reached: NDArray[np.float64]  # how likely all tokens of a draft so far are right, [B]

    def __init__(self, shape: StaticTree, drafter: Drafter) -> None:
        """shape: the longest draft, whose rule is a ``Goodput``."""
        assert isinstance(shape.stop, Goodput)
        self.rule = shape.stop
        self.asks = drafter.draws and drafter.rates_hold  # token by token, each from a distribution of its own
        depths = range(1, shape.depth + 1)  # made once, as they are asked for every round
        self._fixed = [replace(shape, stop=None).truncate(depth) for depth in depths]
        self._asked = [replace(shape, stop=self).truncate(depth) for depth in depths]
        self._sure: list[NDArray[np.float64]] = []  # by level, [B]

    @classmethod
    def of(cls, shape: Shape | None, drafter: Drafter | None) -> "Pace | None":
        """None where no such rule says how long drafts are."""
        if drafter is None or not isinstance(shape, StaticTree) or not isinstance(shape.stop, Goodput):
            return None
        return cls(shape, drafter)

    def shape(self, requests: Sequence[Rounds], room: int) -> StaticTree | None:
        """Of the next round's drafts, of at most ``room`` tokens; None: of no tokens."""
        self._sure = []
        most = min(room, len(self._fixed))
        weighed = self.rule.weigh(requests, most)
        tokens = most if weighed is None else weighed.tokens
        if not tokens:
            return None
        if weighed is None or not self.asks:
            return self._fixed[tokens - 1]
        self._weighed, self._reached = weighed, np.ones(len(requests))
        return self._asked[most - 1]

    def __call__(self, q: Tensor, kept: Tensor) -> Tensor:
        """See ``Stop``: the same for all requests."""
        level, weighed = len(self._sure), self._weighed
        sure = (q.amax(-1).float() ** _POWER).cpu().numpy().astype(np.float64)
        self._sure.append(sure)
        usual = (weighed.sure[level] + _UNSEEN * sure.mean()) / (weighed.tries[level] + _UNSEEN)
        self._reached *= np.minimum(weighed.chances[level] * sure / max(usual, 1e-9), 1.0)
        likely = np.cumprod([self._reached.mean(), *weighed.chances[level + 1 :]])  # how many have this token, the next
        pays = np.cumsum(likely) - weighed.worth * (weighed.costs[level + 1 :] - weighed.costs[level])
        return torch.full_like(kept, not pays.max() > 0, dtype=torch.bool)

    def sure(self, row: int, drafted: int) -> list[float]:
        """How sure the last draft of a request was of its ``drafted`` tokens, to be noted with what was accepted."""
        return [float(level[row]) for level in self._sure[:drafted]]
