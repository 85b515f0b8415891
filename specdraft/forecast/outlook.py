"""What to expect of more tokens, and when another doubling no longer pays."""

import math
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

import numpy as np

from specdraft.forecast.curves import Array, Curves, fit_curves
from specdraft.forecast.runs import Run

CONFIDENCE = 0.9
# Two measurements of a run share their prompts: the noise between them, over the error of one for other prompts.
_ALIKE = 0.7
_DOUBLINGS = 12  # looked ahead: 4096 times the tokens, beyond which no short run says anything
Interval = tuple[float, float]


@dataclass(frozen=True)
class Expectation:
    """Of a training with ``factor`` times the tokens, carried through to the end of its learning rate's decay.
    ``interval``: where the acceptance length on prompts like these lies with a confidence of 90 %. ``measured``: where
    a live measurement on the run's own prompts would lie, its noise included. ``speedup`` is None where no time was
    taken."""

    factor: float
    tokens: float
    acceptance_length: float
    interval: Interval
    measured: Interval
    speedup: float | None
    speedup_interval: Interval | None


@dataclass(frozen=True)
class Outlook:
    """The forecast of one run. ``stop``: tokens behind which another doubling brings less than
    ``worth``, a share of the acceptance length, by half of the curves; None if that lies beyond what is looked ahead.
    ``stop_interval``: by 90 % of the curves, infinity standing for beyond."""

    run: str
    tokens: float
    acceptance_length: float
    readings: float | None  # of the data, by the end of the run
    expectations: list[Expectation]
    next_doubling: float
    next_doubling_interval: Interval
    worth: float
    stop: float | None
    stop_interval: Interval
    families: dict[str, float]

    def to_dict(self) -> dict[str, Any]:
        """JSON-able; infinity is None."""
        found = asdict(self)
        found["stop_interval"] = [None if math.isinf(each) else each for each in self.stop_interval]
        return found


@cache
def fit_run(run: Run, seed: int = 0) -> Curves:
    """The curves that a run's measurements allow."""
    expected = _ALIKE * float(run.errors[-1])
    ceiling = run.num_draft_tokens + 1.0
    return fit_curves(run.tokens, run.lengths, run.decay, ceiling, seed, None if math.isnan(expected) else expected)


def interval_of(values: Array) -> Interval:
    """The middle 90 % of draws."""
    low, high = np.quantile(values, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return float(low), float(high)


def measured_interval(curves: Curves, tokens: float, decay: float, seed: int = 0) -> Interval:
    """Where a live measurement on the run's own prompts will lie."""
    random = np.random.default_rng(seed)
    return interval_of(curves.at(tokens, decay) + curves.noise * random.standard_normal(len(curves.noise)))


def make_outlook(run: Run, factors: list[float], worth: float, seed: int = 0) -> Outlook:
    """What to expect of ``run`` at multiples of its tokens."""
    curves, now = fit_run(run, seed), float(run.tokens[-1])
    decay = run.last_decay
    # One set of prompts is a sample: what it says of others is off by a share that is the same all along the curve.
    error = float(run.errors[-1])
    share = 0.0 if math.isnan(error) else error / max(float(run.lengths[-1]) - 1.0, 1e-9)
    luck = 1.0 + share * np.random.default_rng(seed + 1).standard_normal(len(curves.level))

    def lengths(tokens: float) -> Array:
        return np.clip(1.0 + (curves.at(tokens, decay) - 1.0) * luck, 1.0, curves.ceiling)

    expectations = []
    for factor in factors:
        values = lengths(factor * now)
        low, high = interval_of(values)
        timed = not math.isnan(run.round_cost)
        expectations.append(
            Expectation(
                factor=factor,
                tokens=factor * now,
                acceptance_length=float(np.median(values)),
                interval=(low, high),
                measured=measured_interval(curves, factor * now, decay, seed),
                speedup=float(np.median(values)) / run.round_cost if timed else None,
                speedup_interval=(low / run.round_cost, high / run.round_cost) if timed else None,
            )
        )
    course = np.stack([lengths(now * 2.0**k) for k in range(_DOUBLINGS + 2)])  # [doublings, S]
    enough = course[1:] / course[:-1] - 1.0 < worth
    places = np.append(now * 2.0 ** np.arange(_DOUBLINGS + 1), math.inf)
    stops = places[np.vstack([enough, np.ones((1, enough.shape[1]), dtype=bool)]).argmax(axis=0)]  # [S]
    quantiles = [(1 - CONFIDENCE) / 2, 0.5, (1 + CONFIDENCE) / 2]
    low, stop, high = (float(each) for each in np.quantile(stops, quantiles, method="nearest"))
    return Outlook(
        run=run.name,
        tokens=now,
        acceptance_length=float(run.lengths[-1]),
        readings=None if math.isnan(run.data_tokens) else now / run.data_tokens,
        expectations=expectations,
        next_doubling=float((course[1] - course[0]).mean()),
        next_doubling_interval=interval_of(course[1] - course[0]),
        worth=worth,
        stop=None if math.isinf(stop) else stop,
        stop_interval=(low, high),
        families=curves.families(),
    )
