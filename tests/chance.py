"""What tests of chance share: the sampled distribution by plain formulas, and how well counts fit a distribution."""

import math

import numpy as np
import torch
from scipy import stats
from torch import Tensor

from specdraft.decoding.sampling import Sampling

REJECTED = 1e-4
"""A right rule falls below this p-value once in ten thousand seeds; every wrong one that we try falls far below."""


def plain_probabilities(logits: Tensor, sampling: Sampling) -> Tensor:
    """The distribution over ``[V]`` that temperature, then top-k, then top-p leave, token by token in Python."""
    weights = {token: math.exp(logit / sampling.temperature) for token, logit in enumerate(logits.tolist())}
    ranked = sorted(weights, key=lambda token: -weights[token])
    if sampling.top_k:
        ranked = ranked[: sampling.top_k]
    total = sum(weights[token] for token in ranked)
    kept, mass = [], 0.0
    for token in ranked:
        if mass >= sampling.top_p * total:
            break
        kept.append(token)
        mass += weights[token]
    p = torch.zeros(len(weights), dtype=torch.float64)
    for token in kept:
        p[token] = weights[token] / mass
    return p


def goodness_of_fit(outcomes: Tensor, p: Tensor) -> float:
    """p-value of the chi-square test that ``outcomes`` (``[N]`` flat indices into ``p``) were drawn from ``p``.

    An outcome without probability is impossible, not improbable: it gives 0. Cells that expect fewer than 5 are merged.
    """
    p = p.flatten().double()
    counts = torch.bincount(outcomes, minlength=len(p)).numpy()
    expected = (p / p.sum() * len(outcomes)).numpy()
    if counts[expected == 0].any():
        return 0.0
    large = expected >= 5
    observed = np.append(counts[large], counts[~large].sum())
    wanted = np.append(expected[large], expected[~large].sum())
    return float(stats.chisquare(observed[wanted > 0], wanted[wanted > 0]).pvalue)


def same_rate(successes: int, trials: int, rate: float) -> float:
    """p-value of the exact test that ``successes`` of ``trials`` happened at ``rate``."""
    return float(stats.binomtest(successes, trials, min(rate, 1.0)).pvalue)
