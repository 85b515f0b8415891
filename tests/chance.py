"""What tests of chance share: the sampled distribution by plain formulas, and how well counts fit a distribution."""

import math

import torch
from scipy import stats
from torch import Tensor

from specdraft.check.chance import REJECTED, goodness_of_fit
from specdraft.decoding.sampling import Sampling

__all__ = ["REJECTED", "goodness_of_fit", "plain_probabilities", "same_rate"]


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


def same_rate(successes: int, trials: int, rate: float) -> float:
    """p-value of the exact test that ``successes`` of ``trials`` happened at ``rate``."""
    return float(stats.binomtest(successes, trials, min(rate, 1.0)).pvalue)
