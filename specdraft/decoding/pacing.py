"""What drafted tokens are worth, by earlier rounds: how many to draft, as it is said before a round begins.

B = requests side by side, K = the most tokens drafted.

What a rule of this kind knows are the drafts of earlier rounds and what was accepted of them: nothing that the next
draft draws, so that verification stays exact at every temperature, and nothing that the device has to be waited for."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from specdraft.errors import UserError

_FADES = np.array([0.85, 0.97])  # what a round counts beside the one after it: for its own request, and for all
_SHARED = 16.0  # rounds that what all requests tell counts for each of them
_UNSEEN = 4.0  # rounds that the acceptance rate counts that is expected before any draft was judged


class Rounds:
    """What the rounds of one request tell: how often each token of a draft was tried, and how often it was right where
    all before it were, as a draft tells nothing beyond its end. The newer a round, the more it counts."""

    def __init__(self, judged: Iterable[tuple[int, int]] = ()) -> None:
        """judged: how many tokens each round drafted, and how many were accepted; the newest last."""
        self._counts = np.zeros((2, 3, 8))  # by fade; tries, hits, how sure the draft was; by token
        for drafted, accepted in judged:
            self.note(drafted, accepted)

    def note(self, drafted: int, accepted: int, sure: Sequence[float] = ()) -> None:
        """Another round; ``sure``: how sure the draft was of each token, if it says so (``pace.py``)."""
        if drafted > self._counts.shape[2]:
            self._counts = np.pad(self._counts, ((0, 0), (0, 0), (0, drafted)))
        self._counts *= _FADES[:, None, None]
        self._counts[:, 0, : min(drafted, accepted + 1)] += 1
        self._counts[:, 1, : min(drafted, accepted)] += 1
        if len(judged := sure[: min(drafted, accepted + 1)]):
            self._counts[:, 2, : len(judged)] += judged

    def counts(self, most: int) -> NDArray[np.float64]:
        """Of the first K = ``most`` tokens, as they count for the request and for all: tries, hits, and how sure the
        draft was in all tries together, ``[2, 3, K]``."""
        known = self._counts[:, :, :most]
        return np.pad(known, ((0, 0), (0, 0), (0, most - known.shape[2]))) if known.shape[2] < most else known


class Weighed(NamedTuple):
    """What drafts of 0 to K tokens are worth in the next round, by the rounds before.
    costs: ``[K + 1]`` in plain steps. worth: tokens that a plain step brings with the best fixed length. gains:
    ``[K + 1]`` tokens expected of the requests as they are. chances: ``[K]`` that the first token is accepted, the
    second where the first was, and so on. tries, sure: ``[K]`` how often each was judged, and ``Rounds``' certainty."""

    costs: NDArray[np.float64]
    worth: float
    gains: NDArray[np.float64]
    chances: NDArray[np.float64]
    tries: NDArray[np.float64]
    sure: NDArray[np.float64]

    @property
    def tokens(self) -> int:
        """How many tokens to draft."""
        return int(np.argmax(self.gains - self.worth * self.costs))


@dataclass(frozen=True)
class Goodput:
    """As many tokens as are most worth their time, by what was accepted lately (SmartSpec, 2406.14066, section 4: the
    length of greatest goodput by a moving average of acceptance). ``costs``: what the first drafted token takes,
    drafted and verified, what the second takes, and so on, in plain steps; the last one holds for all further tokens.
    Or such costs by the number of requests side by side, between which they lie on a line. None: not known yet, and
    all are drafted. ``expected``: how often a token is accepted where those before it were, before anything is known.

    How likely a token is reached and accepted is counted over the last rounds of each request, the newer the more, and
    of all of them where a request tells little. A token is drafted if it brings more than its time would bring with
    the fixed length that is best by these counts; where none pays, nothing is drafted until the counts are old. A draft
    that grows from distributions is judged again before every token, by how sure it is (``pace.py``)."""

    costs: Sequence[float] | Mapping[int, Sequence[float]] | None = field(default=None, hash=False)
    expected: float = 0.8
    _whole: dict[tuple[int, int], NDArray[np.float64]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        if not 0 <= self.expected <= 1:
            raise UserError(f"a token is expected to be accepted with {self.expected}: expected a number from 0 to 1")
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
            costs = self._whole[key] = _whole_costs(self.costs, *key)
        known = np.array([each.counts(most) for each in requests])  # [B, 2, 3, K]
        each, shared = _chances(known, self.expected)
        worth = float((_gains(shared, 1.0) / (1.0 + costs)).max())
        chances = shared / np.maximum(np.concatenate([[1.0], shared[:-1]]), 1e-9)
        tries, _, sure = known[:, 1].sum(0)
        return Weighed(costs, worth, _gains(each, 0.0), chances, tries, sure)

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
    costs: Sequence[float] | Mapping[int, Sequence[float]], requests: int, most: int
) -> NDArray[np.float64]:
    """Of 0 to ``most`` drafted tokens of so many requests side by side."""
    curves = costs if isinstance(costs, Mapping) else {1: costs}
    whole = [np.cumsum([0.0, *each[:most], *[each[-1]] * (most - len(each))]) for each in curves.values()]
    return np.array([np.interp(requests, list(curves), each) for each in zip(*whole, strict=True)])


def _gains(chances: NDArray[np.float64], at_least: float) -> NDArray[np.float64]:
    """Tokens that a round of 0 to K drafted ones is expected to bring."""
    return at_least + np.concatenate([[0.0], np.cumsum(chances)])


def _chances(known: NDArray[np.float64], expected: float) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """How likely the first 1 to K drafted tokens are all accepted, ``[K]``, by the counts ``[B, 2, 3, K]``: in the mean
    over requests by the last rounds of each, and by those of all alike."""
    tries, hits, _ = known[:, 1].sum(0)  # [K]
    shared = (hits + _UNSEEN * expected) / (tries + _UNSEEN)
    middle = (hits.sum() + _UNSEEN * expected) / (tries.sum() + _UNSEEN)
    tries, hits, _ = known[:, 0].swapaxes(0, 1)  # [B, K]
    own = (hits.sum(1) + _SHARED * middle) / (tries.sum(1) + _SHARED)  # [B], as a request is easy on all levels alike
    usual = np.minimum(own[:, None] * shared / max(middle, 1e-9), 1.0)
    each = (hits + _SHARED * usual) / (tries + _SHARED)
    return np.cumprod(each, axis=1).mean(0), np.cumprod(shared)
