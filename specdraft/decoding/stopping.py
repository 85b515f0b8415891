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


@dataclass(frozen=True)
class Goodput:
    """Ends, for all requests side by side, where another token of each would bring fewer than ``price`` tokens: the
    mean over requests of how likely the most likely chain with it is, as the draft sees it. price None: not known yet,
    and nothing ends.

    A reward that is renewed with every round is greatest in the long run if a round goes on as long as the next token
    brings more than what its time brings elsewhere (SmartSpec, 2406.14066, maximizes the same goodput over lengths that
    it forecasts). Side by side a level takes its time whether one request drafts it or all do."""

    price: float | None = None

    def __post_init__(self) -> None:
        if self.price is not None and not self.price >= 0:
            raise UserError(f"a draft is to end at a price of {self.price} tokens: expected a number of at least 0")

    def __call__(self, q: Tensor, kept: Tensor) -> Tensor:
        """See ``Stop``."""
        if self.price is None:
            return torch.zeros_like(kept, dtype=torch.bool)
        return ((q.amax(-1) * kept).mean() < self.price).expand(len(kept))

    def __str__(self) -> str:
        return "while a token pays" if self.price is None else f"while a token brings {self.price:.2g}"


def price_of_a_token(tokens: int, speedup: float, round_seconds: float, step_seconds: float) -> float:
    """``Goodput.price`` from the fastest chain of fixed length: ``tokens`` drafted in rounds of ``round_seconds``. It
    brings ``speedup`` tokens in the time of a plain step; if that is below 1, plain steps bring more."""
    return max(speedup, 1.0) * max(round_seconds - step_seconds, 0.0) / (tokens * step_seconds)
