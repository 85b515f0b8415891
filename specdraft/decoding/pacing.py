"""What drafted tokens are worth, by earlier rounds: how many to draft, as it is said before a round begins.

B = requests side by side, K = the most tokens drafted.

What a rule of this kind knows are the drafts of earlier rounds and what was accepted of them: nothing that the next
draft draws, so that verification stays exact at every temperature, and nothing that the device has to be waited for."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import mul
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from specdraft.errors import UserError

_FADES = (0.85, 0.97)  # what a round counts beside the one after it: for its own request, and for all
_SHARED = 16.0  # rounds that what all requests tell counts for each of them
_UNSEEN = 4.0  # rounds that the acceptance rate counts that is expected before any draft was judged
_LARGE = 1e9  # a unit of counts in which they are written down anew
_TOLD = 1.0  # spread of what is expected, below which judged drafts hardly say how much a draft's certainty tells


class Rounds:
    """What the rounds of one request tell: how often each token of a draft was tried, how often it was right where all
    before it were, as a draft tells nothing beyond its end, and how sure the draft was of it when it was tried
    (``pace.py``). The newer a round, the more it counts: for its own request, and more slowly for all. Plain numbers,
    of which a round changes few: all requests note every round, in a time that a small target's pass has many times."""

    def __init__(self, judged: Iterable[tuple[int, int]] = ()) -> None:
        """judged: how many tokens each round drafted, and how many were accepted; the newest last."""
        # A token of the draft each, in units of what the newest round counts, which grow where counts would fade.
        self._own: list[list[float]] = []  # tries, hits
        self._shared: list[list[float]] = []  # also sums of how sure, of squares, and of how sure of the hits
        self._units = [1.0, 1.0]
        for drafted, accepted in judged:
            self.note(drafted, accepted)

    def note(self, drafted: int, accepted: int, sure: Sequence[float] = ()) -> None:
        """Another round; ``sure``: how sure the draft was of each token, if it says so."""
        units = self._units = [unit / fade for unit, fade in zip(self._units, _FADES, strict=True)]
        if units[0] > _LARGE:
            self._rescale()
            units = self._units
        mine, all_ = units
        for token in range(min(drafted, accepted + 1)):
            if token == len(self._own):
                self._own.append([0.0] * 2)
                self._shared.append([0.0] * 5)
            own, shared = self._own[token], self._shared[token]
            own[0] += mine
            shared[0] += all_
            if token < accepted:
                own[1] += mine
                shared[1] += all_
            if token < len(sure):
                each = sure[token] * all_
                shared[2] += each
                shared[3] += each * sure[token]
                shared[4] += each * (token < accepted)

    def _rescale(self) -> None:
        for unit, tokens in zip(self._units, (self._own, self._shared), strict=True):
            for counts in tokens:
                counts[:] = [each / unit for each in counts]
        self._units = [1.0, 1.0]

    def add_to(self, totals: list[list[float]]) -> None:
        """Add tries, hits, and the sums of how sure, of squares, and of how sure of the hits, as they count for all
        requests, to those of the first K tokens, ``[K, 5]``."""
        share = 1.0 / self._units[1]
        for total, counts in zip(totals, self._shared, strict=False):
            for place, each in enumerate(counts):
                total[place] += share * each

    def counts(self, most: int) -> list[list[list[float]]]:
        """Tries and hits of the first K = ``most`` tokens, as they count for the request and for all: ``[2, 2, K]``."""
        both = zip(self._units, (self._own, self._shared), strict=True)
        return [
            [[counts[place] / unit for counts in tokens[:most]] + [0.0] * (most - len(tokens)) for place in (0, 1)]
            for unit, tokens in both
        ]


class Weighed(NamedTuple):
    """What drafts of 0 to K tokens are worth in the next round, by the last rounds of all requests alike.
    costs: K + 1, in plain steps, beyond one. best: the fixed length that brings most, and worth: tokens that a plain
    step brings with it. chances: K, that the first token is accepted, the second where the first was, and so on. tries,
    sure: K, how often each was judged, and how sure drafts were of it in all tries together. tells: how a chance goes
    with how sure a draft is of the token, by the drafts that were judged: 0, not at all; 1, in proportion."""

    costs: list[float]
    best: int
    worth: float
    chances: list[float]
    tries: list[float]
    sure: list[float]
    tells: float


@dataclass(frozen=True)
class Goodput:
    """As many tokens as are most worth their time, by what was accepted lately (SmartSpec, 2406.14066, section 4: the
    length of greatest goodput by a moving average of acceptance). ``costs``: what the first drafted token takes,
    drafted and verified, what the second takes, and so on, in plain steps; the last one holds for all further tokens.
    Or such costs by the number of requests side by side, between which they lie on a line. None: not known yet, and
    all are drafted. ``expected``: how often a token is accepted where those before it were, before anything is known.
    ``idle``: what a round without a draft takes beyond a plain step, as the drafter reads what is emitted.

    How likely a token is reached and accepted is counted over the last rounds of each request, the newer the more, and
    of all of them where a request tells little. A token is drafted if it brings more than its time would bring with
    the fixed length that is best by these counts; where none pays, nothing is drafted until the counts are old. A draft
    that grows from distributions is judged again after every token, by how sure it was of it (``pace.py``)."""

    costs: Sequence[float] | Mapping[int, Sequence[float]] | None = field(default=None, hash=False)
    expected: float = 0.8
    idle: float = 0.0
    _whole: dict[tuple[int, int], list[float]] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not 0 <= self.expected <= 1:
            raise UserError(f"a token is expected to be accepted with {self.expected}: expected a number from 0 to 1")
        if not self.idle >= 0:
            raise UserError(f"a round without a draft takes {self.idle} plain steps more: expected at least 0")
        if self.costs is None:
            return
        curves = self.costs if isinstance(self.costs, Mapping) else {1: self.costs}
        curves = {int(requests): tuple(map(float, each)) for requests, each in curves.items()}
        if not curves or not all(each and all(cost >= 0 for cost in each) for each in curves.values()):
            wanted = "numbers of at least 0, in plain steps: of the first token, the second, ..., each further one"
            raise UserError(f"a draft is to be as long as pays with costs {self.costs}: expected {wanted}")
        costs = dict(sorted(curves.items())) if isinstance(self.costs, Mapping) else curves[1]
        object.__setattr__(self, "costs", costs)

    def weigh(self, requests: Sequence[Rounds], most: int) -> Weighed | None:
        """What up to ``most`` tokens for each of the requests are worth next; None if nothing is known to tell."""
        if self.costs is None or not requests:
            return None
        key = len(requests), most
        if (costs := self._whole.get(key)) is None:  # asked every round, and the same
            costs = self._whole[key] = _whole_costs(self.costs, self.idle, *key)
        totals = [[0.0] * 5 for _ in range(most)]
        for request in requests:
            request.add_to(totals)
        tries, hits, sure = ([counts[place] for counts in totals] for place in range(3))
        chances = [(h + _UNSEEN * self.expected) / (t + _UNSEEN) for t, h in zip(tries, hits, strict=True)]
        best, worth, tokens = 0, 1.0 / (1.0 + costs[0]), 1.0
        for drafted, likely in enumerate(accumulate(chances, mul), start=1):
            tokens += likely
            if (rate := tokens / (1.0 + costs[drafted])) > worth:
                best, worth = drafted, rate
        return Weighed(costs, best, worth, chances, tries, sure, _tells(chances, totals))

    def tokens(self, requests: Sequence[Rounds], most: int) -> int:
        """How many tokens to draft for each of the requests next, 0 to ``most``, where a draft does not say how sure it
        is: by what was accepted of each request as well."""
        if (weighed := self.weigh(requests, most)) is None:
            return most
        known = np.array([each.counts(most) for each in requests])  # [B, 2, 2, K]
        gains = np.concatenate([[0.0], np.cumsum(_chances(known, weighed.chances, self.expected))])
        return int(np.argmax(gains - weighed.worth * np.array(weighed.costs)))

    @property
    def lacks(self) -> str | None:
        """What has to be measured first, as a setting; None if it is known."""
        wanted = "decoding.shape.stop.costs=[FIRST,...,FURTHER], as evaluate.py measures them (its draft_costs)"
        return wanted if self.costs is None else None

    def __str__(self) -> str:
        return "as long as pays"


def costs_of_tokens(step_seconds: float, round_seconds: Mapping[int, float]) -> tuple[float, ...]:
    """``Goodput.costs`` by the seconds of a plain step, and of rounds that draft so many tokens, by their number. What
    was not measured lies on a line between its neighbors; the first tokens on that of the two shortest drafts."""
    lengths = sorted(round_seconds)
    more = [max(round_seconds[length] / step_seconds - 1.0, 0.0) for length in lengths]  # than a plain step
    slope = more[0] / lengths[0]  # of a single one nothing tells what the first token takes besides
    if len(lengths) > 1:
        slope = max(more[1] - more[0], 0.0) / (lengths[1] - lengths[0])
    first = max(more[0] - slope * (lengths[0] - 1), 0.0)
    if lengths[0] > 1:
        lengths, more = [1, *lengths], [first, *more]
    whole = np.maximum.accumulate(np.interp(np.arange(1, lengths[-1] + 1), lengths, more))
    return tuple(np.diff(whole, prepend=0.0).tolist())


def acceptance_rate(judged: Iterable[tuple[int, int]]) -> float:
    """``Goodput.expected`` by rounds, how many tokens each drafted and how many were accepted: the share that was
    accepted of the tokens behind accepted ones."""
    right = wrong = 0
    for drafted, accepted in judged:
        right, wrong = right + accepted, wrong + (accepted < drafted)
    return right / (right + wrong) if right else 0.0


def _whole_costs(
    costs: Sequence[float] | Mapping[int, Sequence[float]], idle: float, requests: int, most: int
) -> list[float]:
    """Of 0 to ``most`` drafted tokens of so many requests side by side. No draft takes as long as one at most."""
    curves = costs if isinstance(costs, Mapping) else {1: costs}
    whole = [np.cumsum([0.0, *each[:most], *[each[-1]] * (most - len(each))]) for each in curves.values()]
    found = [float(np.interp(requests, list(curves), each)) for each in zip(*whole, strict=True)]
    return [min(idle, found[1]), *found[1:]]


def _tells(chances: Sequence[float], totals: Sequence[Sequence[float]]) -> float:
    """``Weighed.tells``: the slope of hits over the chances that would go in proportion with how sure drafts were, by
    least squares within each token of a draft. totals: ``[K, 5]``, as of ``Rounds.add_to``."""
    together = spread = _TOLD
    for chance, (tries, hits, sums, squares, of_hits) in zip(chances, totals, strict=True):
        if sums > 0:
            by = chance * tries / sums
            together += by * (of_hits - hits * sums / tries)
            spread += by * by * (squares - sums * sums / tries)
    return max(together / spread, 0.0)


def _chances(known: NDArray[np.float64], shared: Sequence[float], expected: float) -> NDArray[np.float64]:
    """How likely the first 1 to K drafted tokens are all accepted, ``[K]``, in the mean over requests by the last
    rounds of each. known: ``[B, 2, 2, K]``, ``Rounds.counts``; shared: ``Weighed.chances``."""
    tries, hits = known[:, 1].sum(0)  # [K]
    middle = (hits.sum() + _UNSEEN * expected) / (tries.sum() + _UNSEEN)
    tries, hits = known[:, 0].swapaxes(0, 1)  # [B, K]
    own = (hits.sum(1) + _SHARED * middle) / (tries.sum(1) + _SHARED)  # [B], as a request is easy on all levels alike
    usual = np.minimum(own[:, None] * np.array(shared) / max(middle, 1e-9), 1.0)
    each = (hits + _SHARED * usual) / (tries + _SHARED)
    return np.cumprod(each, axis=1).mean(0)
