"""When a growing chain ends before its longest: rules that make its length follow the draft's own certainty.

B = requests, Vd = draft vocabulary.

A rule is asked before a token is drawn, and is shown the distribution ``q [B, Vd]`` that the token would be drawn from
and the probabilities ``kept [B]`` with which the draft says what it holds so far. Nothing else: a rule that looked at a
token and then dropped it would take tokens out of q without q knowing, and verification would not be exact any more.
What is drawn is verified."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from specdraft.errors import UserError

Stop = Callable[[Tensor, Tensor], Tensor]
"""``(q [B, Vd], kept [B]) -> bool [B]``: whether a request's draft ends here."""


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
