"""Learning curves of acceptance: saturating families, each weighed by how well it fits, and draws from all of them.

N = measurements, S = draws.

No family is right: over the first measurements a power law, a logarithm that is cut at the ceiling, an exponential and
a Hill curve can hardly be told apart, and a hundred times further they disagree. So none is chosen. Each shape of each
family is a linear regression

    tau(n) = level + rise * shape(n / n_N) + decay_gain * decay(n) + noise

with a Gaussian prior, whose evidence weighs it (Bayesian model averaging: Hoeting et al. 1999); the draws of the
forecast come from all, and so does its interval. A constant is a family as well: acceptance may have stopped rising.
What cannot be is left out: acceptance that falls with more training, and lengths above ``ceiling``.

``decay`` is the share of the peak by which the learning rate has come down. As long as it is high, weights jump around
a better head than they are; its fall brings acceptance beyond what more tokens do (Haegele et al. 2024). The first
half of a run can hardly show that, so there is a prior for it, and what is still to come of the fall may bring more or
less than its beginning did."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

DRAWS = 4000
# Of n / n_N: by which a curve has risen by half or so.
_SCALES = (0.08, 0.12, 0.18, 0.27, 0.4, 0.6, 0.9, 1.3, 2.0, 3.0, 4.5)
_DECAY_MEAN, _DECAY_SPREAD = 0.05, 0.05  # of tau - 1: what the fall of the learning rate to zero is taken to bring
_UNSEEN_MEAN, _UNSEEN_SPREAD = 0.05, 0.15  # the same, besides, of what is still to come of the fall, as ten runs had it
_NOISE, _NOISE_WEIGHT = 0.02, 4.0  # of tau - 1: noise expected before any is seen, worth so many measurements
_MOST_ALIKE = 0.8  # highest correlation of neighboring residuals that is reckoned with


@dataclass(frozen=True)
class _Shape:
    """A curve from 0 measurements on, over n / n_N; ``limit``: where it ends, infinity where it does not."""

    family: str
    height: Callable[[Array], Array]
    limit: float


def _shapes() -> Iterator[_Shape]:
    yield _Shape("constant", np.zeros_like, 0.0)
    yield _Shape("logarithm", np.log, math.inf)
    for power in (0.1, 0.2, 0.3, 0.4, 0.5, 0.7, 1.0, 1.4):
        yield _Shape("power law", lambda x, b=power: -(x**-b), 0.0)  # type: ignore[misc]
    for scale in _SCALES:
        yield _Shape("exponential", lambda x, s=scale: -np.exp(-x / s), 0.0)  # type: ignore[misc]
    for power in (0.7, 1.0, 1.4, 2.0):
        for half in _SCALES:
            yield _Shape("Hill", lambda x, b=power, h=half: 1 / (1 + (h / x) ** b), 1.0)  # type: ignore[misc]


SHAPES = tuple(_shapes())
FAMILIES = tuple(dict.fromkeys(shape.family for shape in SHAPES))


@dataclass(frozen=True)
class Curves:
    """Draws of a curve, ``[S]`` each. ``noise`` is the standard deviation of a measurement about its curve. Behind
    ``seen``, the decay at the last measurement, decay brings ``unseen_gain`` besides ``decay_gain``."""

    scale: float  # n_N
    first: float  # n_1 / n_N
    ceiling: float
    shape: NDArray[np.int64]
    level: Array
    rise: Array
    decay_gain: Array
    noise: Array
    seen: float
    unseen_gain: Array

    def at(self, amount: float, decay: float = 1.0) -> Array:
        """Acceptance lengths of every draw behind ``amount`` (tokens, conversations), with so much of the decay."""
        values = self.level + self.decay_gain * decay
        if decay > self.seen:
            values += self.unseen_gain * (decay - self.seen)
        for index in np.unique(self.shape):
            drawn = self.shape == index
            values[drawn] += self.rise[drawn] * _scaled(SHAPES[index], np.array([amount / self.scale]), self.first)
        return np.minimum(values, self.ceiling)

    def families(self) -> dict[str, float]:
        """The share of the draws that each family has."""
        drawn = np.array([SHAPES[index].family for index in self.shape])
        return {family: float((drawn == family).mean()) for family in FAMILIES}


def _scaled(shape: _Shape, x: Array, first: float) -> Array:
    """The shape from -1 at the first measurement to 0 at the last, so that one prior of the rise fits every family."""
    low, high = shape.height(np.array([first, 1.0]))
    return (shape.height(x) - high) / ((high - low) or 1.0)


@dataclass(frozen=True)
class _Prior:
    """Of level, rise and decay gain, and of the noise. ``known``: the noise is exactly what is expected."""

    mean: Array  # [3]
    precision: Array  # [3, 3]
    noise: float
    known: bool


@dataclass(frozen=True)
class _Posterior:
    """Of one shape."""

    evidence: float  # its logarithm
    mean: Array  # [3]
    covariance: Array  # [3, 3]
    noise: float


def fit_curves(
    amounts: Array,
    lengths: Array,
    decay: Array,
    ceiling: float,
    seed: int = 0,
    noise: float | None = None,
    known: bool = False,
) -> Curves:
    """Fit acceptance lengths measured behind ascending ``amounts``, ``[N]`` each, N >= 2. ``ceiling``: K + 1.
    ``noise``: the standard deviation that is expected of a measurement. Unless it is ``known``, it is estimated as
    well, with the correlation of neighbors, which makes N measurements tell less."""
    scale, gained = float(amounts[-1]), max(float(lengths[-1]) - 1.0, 0.1)
    x, first = amounts / scale, float(amounts[0]) / scale
    mean, spread = np.array([float(lengths[-1]), 0.0, _DECAY_MEAN * gained]), _DECAY_SPREAD * gained
    seen = float(decay[-1])
    if not decay.any():  # runs are compared at their ends: it is the same for all, and part of the level
        mean[2], spread, seen = 0.0, 1e-6, 1.0
    precision = np.diag(np.array([ceiling, ceiling, spread]) ** -2.0)
    prior = _Prior(mean, precision, noise or _NOISE * gained, known)
    designs = [np.stack([np.ones_like(x), _scaled(shape, x, first), decay], axis=1) for shape in SHAPES]
    weight = 1.0
    if not known:
        found = [_posterior(design, lengths, prior, 1.0) for design in designs]
        best = max(range(len(SHAPES)), key=lambda index: found[index].evidence)
        residuals = lengths - designs[best] @ found[best].mean
        expected = _NOISE_WEIGHT * prior.noise**2  # so that residuals that are nothing are not called alike
        alike = float(residuals[1:] @ residuals[:-1]) / (float(residuals @ residuals) + expected)
        alike = min(max(alike, 0.0), _MOST_ALIKE)
        weight = (1 - alike) / (1 + alike)
    found = [_posterior(design, lengths, prior, weight) for design in designs]
    sizes = np.array([sum(shape.family == other.family for other in SHAPES) for shape in SHAPES])
    evidence = np.array([each.evidence for each in found]) - np.log(sizes)
    odds = np.exp(evidence - evidence.max())
    freedom = math.inf if known else weight * (len(x) + _NOISE_WEIGHT)
    random = np.random.default_rng(seed)
    shape, values, noises = _draw(found, odds / odds.sum(), random, first, ceiling, freedom)
    unseen = gained * (_UNSEEN_MEAN + _UNSEEN_SPREAD * random.standard_normal(len(shape)))
    return Curves(scale, first, ceiling, shape, values[:, 0], values[:, 1], values[:, 2], noises, seen, unseen)


def _posterior(design: Array, lengths: Array, prior: _Prior, weight: float) -> _Posterior:
    """Linear regression of one shape, with the most likely noise where it is not known."""
    variance, freedom = prior.noise**2, len(lengths) + _NOISE_WEIGHT
    for _ in range(1 if prior.known else 5):
        information = design.T @ design * weight / variance + prior.precision
        seen = design.T @ lengths * weight / variance + prior.precision @ prior.mean
        mean = np.asarray(np.linalg.solve(information, seen), dtype=np.float64)
        squares = float(((lengths - design @ mean) ** 2).sum()) + _NOISE_WEIGHT * prior.noise**2
        if not prior.known:
            variance = squares / freedom
    apart = mean - prior.mean
    evidence = -0.5 * weight * (freedom * math.log(variance) + squares / variance)
    evidence -= 0.5 * float(apart @ prior.precision @ apart) + 0.5 * float(np.linalg.slogdet(information)[1])
    covariance = np.asarray(np.linalg.inv(information), dtype=np.float64)
    return _Posterior(evidence, mean, covariance, math.sqrt(variance))


def _draw(
    found: list[_Posterior], odds: Array, random: np.random.Generator, first: float, ceiling: float, freedom: float
) -> tuple[NDArray[np.int64], Array, Array]:
    """Shapes ``[S]``, level, rise and decay gain ``[S, 3]``, and noise ``[S]`` of draws from all shapes, without those
    that fall or end above the ceiling."""
    constant = np.array([shape.family == "constant" for shape in SHAPES])
    ends = np.array([_end(shape, first) for shape in SHAPES])
    kept: list[tuple[NDArray[np.int64], Array, Array]] = []
    while sum(len(each[0]) for each in kept) < DRAWS:
        chosen = random.choice(len(SHAPES), DRAWS, p=odds)
        widths = np.ones(DRAWS) if math.isinf(freedom) else np.sqrt(freedom / random.chisquare(freedom, DRAWS))
        values = random.standard_normal((DRAWS, 3)) * widths[:, None]
        for index in np.unique(chosen):
            own = chosen == index
            values[own] = found[index].mean + values[own] @ np.linalg.cholesky(found[index].covariance).T
        values[constant[chosen], 1] = 0.0
        values[:, 2] = np.maximum(values[:, 2], 0.0)
        highest = values[:, 0] + np.maximum(values[:, 1], 0.0) * ends[chosen] + values[:, 2]
        possible = (values[:, 1] >= 0) & (highest <= ceiling)
        if not possible.any():  # measured at the ceiling, or falling steeply: the nearest that can be
            values[:, 1], values[:, 0], possible = 0.0, np.minimum(values[:, 0], ceiling), possible | True
        noises = np.array([each.noise for each in found])[chosen] * widths
        kept.append((chosen[possible], values[possible], noises[possible]))
    shape, values, noises = (np.concatenate(each)[:DRAWS] for each in zip(*kept, strict=True))
    return shape, values, noises


def _end(shape: _Shape, first: float) -> float:
    """Where the scaled shape ends; 0 for one that has no end, which the ceiling cuts."""
    if math.isinf(shape.limit):
        return 0.0
    low, high = shape.height(np.array([first, 1.0]))
    return float((shape.limit - high) / ((high - low) or 1.0))
