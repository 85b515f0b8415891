"""How long the drafts of a decoding go on, where a rule says so by what they are worth.

B = requests side by side, K = the most tokens drafted, Vd = draft vocabulary.

A level takes its time whether one request drafts it or all: all go on, or none. Before a round the rule tells from
earlier ones whether to draft at all. A drafter that grows its drafts from distributions is asked again after every
token, before it takes another pass: where it was surer of a token than it usually is there, the token is taken to be
right more often, and the other way round, as much as judged drafts have shown. Only distributions are looked at that
drafted tokens were drawn from: what is drawn is verified, and verification stays exact (``stopping.py``)."""

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from specdraft.decoding.interfaces import Drafter
from specdraft.decoding.pacing import Goodput, Rounds, Weighed
from specdraft.decoding.shapes import Shape, StaticTree
from specdraft.decoding.stopping import JointStop

_UNSEEN = 4.0  # tokens that what the requests are sure of now counts, beside those that were judged


class Pace(JointStop):
    """The lengths of a decoding's drafts, round by round. What is asked for every token is reckoned in plain numbers: a
    pass of a small head is over in the time of some dozens of calls of torch or numpy."""

    _weighed: Weighed  # for the round under way
    _reached: list[float]  # how likely all tokens of each draft so far are right, [B]

    def __init__(self, shape: StaticTree, drafter: Drafter) -> None:
        """shape: the longest draft, whose rule is a ``Goodput``."""
        assert isinstance(shape.stop, Goodput)
        self.rule = shape.stop
        self.asks = drafter.draws and drafter.rates_hold  # token by token, each from a distribution of its own
        depths = range(1, shape.depth + 1)  # made once, as they are asked for every round
        self._fixed = [replace(shape, stop=None).truncate(depth) for depth in depths]
        self._asked = [replace(shape, stop=self).truncate(depth) for depth in depths]
        self._sure: list[list[float]] = []  # by level, [B]

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
        if not self.asks:
            tokens = self.rule.tokens(requests, most)
            return self._fixed[tokens - 1] if tokens else None
        if (weighed := self.rule.weigh(requests, most)) is None:
            return self._fixed[most - 1]
        self._weighed, self._reached = weighed, [1.0] * len(requests)
        return self._asked[most - 1] if weighed.best else None

    def ends(self, greatest: Tensor) -> bool:
        """See ``JointStop``."""
        level, sure = len(self._sure), greatest.tolist()
        self._sure.append(sure)
        weighed, requests = self._weighed, len(sure)
        usual = (weighed.sure[level] + _UNSEEN * sum(sure) / requests) / (weighed.tries[level] + _UNSEEN)
        steep = weighed.chances[level] * weighed.tells / max(usual, 1e-9)
        surely = weighed.chances[level] - steep * usual
        for row, each in enumerate(sure):
            right = surely + steep * each
            self._reached[row] *= 0.0 if right < 0.0 else min(right, 1.0)
        return sum(self._reached) / requests <= self._least(level + 1)

    def _least(self, drafted: int) -> float:
        """How many requests must have all ``drafted`` tokens right for another one to pay, or for some more."""
        costs, _, worth, chances, *_ = self._weighed
        least, tokens, likely = float("inf"), 0.0, 1.0  # what more tokens bring where all before them are right
        for depth in range(drafted + 1, len(costs)):
            likely *= chances[depth - 1]
            tokens += likely
            least = min(least, worth * (costs[depth] - costs[drafted]) / max(tokens, 1e-9))
        return least

    def sure(self, row: int, drafted: int) -> list[float]:
        """How sure the last draft of a request was of its ``drafted`` tokens, to be noted with what was accepted."""
        return [level[row] for level in self._sure[:drafted]]
