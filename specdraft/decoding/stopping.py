"""When a growing chain ends before its longest: rules that make its length follow the draft's own certainty.

B = requests, Vd = draft vocabulary.

A rule is asked before a token is drawn, and is shown the distribution ``q [B, Vd]`` that the token would be drawn from
and the probabilities ``kept [B]`` with which the draft says what it holds so far. Nothing else: a rule that looked at a
token and then dropped it would take tokens out of q without q knowing, and verification would not be exact any more.
What is drawn is verified."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from specdraft.errors import UserError

Stop = Callable[[Tensor, Tensor], Tensor]
"""``(q [B, Vd], kept [B]) -> bool [B]``: whether a request's draft ends here."""


class JointStop(ABC):
    """A rule by which the drafts of all requests side by side end together, asked after every token but the last."""

    @abstractmethod
    def ends(self, greatest: Tensor) -> bool:
        """Whether they end with the token just drafted; ``greatest [B]``: the greatest probability of the distribution
        that it was drawn from."""


@dataclass(frozen=True)
class Confidence:
    """Ends where the most likely next token is less likely than ``threshold``; if ``joint``, where the whole chain with
    it is, as the draft sees it."""

    threshold: float = 0.4
    joint: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.threshold <= 1:
            raise UserError(f"a draft is to end at a confidence of {self.threshold}: expected a number from 0 to 1")

    def __call__(self, q: Tensor, kept: Tensor) -> Tensor:
        """See ``Stop``."""
        best = q.amax(-1)
        return (best * kept if self.joint else best) < self.threshold

    def __str__(self) -> str:
        return f"while {'jointly ' if self.joint else ''}{self.threshold} sure"


@dataclass(frozen=True)
class EntropyBound:
    """Ends where 1 - sqrt(``gamma`` * H(q)), a lower bound on the acceptance rate with the entropy H in nats, falls
    below ``least`` (AdaEDL, 2410.18351, equation 7)."""

    gamma: float = 0.2
    least: float = 0.4

    def __post_init__(self) -> None:
        if not (self.gamma > 0 and self.least <= 1):
            given = f"gamma {self.gamma} and least {self.least}"
            raise UserError(f"a draft is to end by its entropy with {given}: expected gamma above 0 and least up to 1")

    def __call__(self, q: Tensor, kept: Tensor) -> Tensor:
        """See ``Stop``."""
        entropy = torch.special.entr(q).sum(-1)
        return 1 - torch.sqrt(self.gamma * entropy) < self.least

    def __str__(self) -> str:
        return f"while 1 - sqrt({self.gamma} H) is {self.least} or more"


@dataclass(frozen=True)
class Learned:
    """Ends where a token is accepted, and all before it, with a probability below ``least``, by what was learned from
    drafts that were judged (SpecDec++, 2405.19715: a rejection with more than 0.7). A logistic regression, with
    ``weights`` for what ``evidence`` tells, in the place of the paper's head on the draft's hidden states: every
    drafter has a distribution. weights None: nothing is learned yet, and nothing ends."""

    least: float = 0.3
    weights: Sequence[float] | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.least <= 1:
            raise UserError(f"a draft is to end at a chance of {self.least}: expected a number from 0 to 1")
        if self.weights is not None:
            if len(self.weights) != EVIDENCE:
                wanted = f"{EVIDENCE}, as evaluate.py learns them (stop_weights in evaluation.json)"
                raise UserError(f"a draft is to end by {len(self.weights)} learned weights: expected {wanted}")
            object.__setattr__(self, "weights", tuple(map(float, self.weights)))  # a list has no hash

    def __call__(self, q: Tensor, kept: Tensor) -> Tensor:
        """See ``Stop``."""
        if self.weights is None:
            return torch.zeros_like(kept, dtype=torch.bool)
        found = evidence(q, kept)
        return (found @ found.new_tensor(self.weights)).sigmoid() < self.least

    @property
    def lacks(self) -> str | None:
        """What has to be learned first, as a setting; None if it is known."""
        wanted = "decoding.shape.stop.weights=[...], as evaluate.py learns them (stop_weights in evaluation.json)"
        return wanted if self.weights is None else None

    def __str__(self) -> str:
        return f"while accepted with {self.least}, as {'is to be ' if self.weights is None else ''}learned"


EVIDENCE = 4


def evidence(q: Tensor, kept: Tensor) -> Tensor:
    """What a draft tells of its next token before it is drawn, ``[B, 4]`` fp32: 1, the logarithm of the greatest
    probability, the entropy in nats, and the logarithm of how likely the draft thinks what it holds."""
    q, tiny = q.float(), torch.finfo(torch.float32).tiny
    best, before = (part.float().clamp_min(tiny).log() for part in (q.amax(-1), kept))
    return torch.stack([torch.ones_like(best), best, torch.special.entr(q).sum(-1), before], dim=-1)


@dataclass
class Recording:
    """Ends nothing, and keeps the ``evidence`` of every token, level by level, for what is to be learned from it."""

    found: list[Tensor] = field(default_factory=list)  # [B, 4] each

    def __call__(self, q: Tensor, kept: Tensor) -> Tensor:
        """See ``Stop``."""
        self.found.append(evidence(q, kept))
        return torch.zeros_like(kept, dtype=torch.bool)

    def __hash__(self) -> int:
        return id(self)


def learn_weights(found: Tensor, accepted: Tensor, ridge: float = 1.0) -> list[float]:
    """The weights of a logistic regression of ``accepted [n]`` (bool) on the evidence ``found [n, 4]``, by Newton's
    method. ridge: half the penalty on a weight of one but the first; it keeps weights finite where all was accepted, or
    nothing."""
    x, y = found.double(), accepted.double()
    penalty = torch.full((x.shape[1],), ridge, dtype=x.dtype)
    penalty[0] = 1e-3 * ridge
    weights = torch.zeros_like(penalty)
    for _ in range(50):
        chance = (x @ weights).sigmoid()
        gradient = x.T @ (chance - y) + penalty * weights
        curvature = (x * (chance * (1 - chance))[:, None]).T @ x + penalty.diag()
        step = torch.linalg.solve(curvature, gradient)
        weights = weights - step * min(1.0, 5.0 / float(step.norm()))  # a long step may overshoot
        if float(step.norm()) < 1e-9:
            break
    return [float(weight) for weight in weights]
