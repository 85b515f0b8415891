"""Verification rules: pure functions from a draft and the target's verdict to what is emitted.

Row 0 of ``p`` is the target's distribution after the last emitted token, row i + 1 the one after draft node i.
Both rules are exact: what is emitted is distributed as plain sampling from the target (greedy: token-identical).
"""

from typing import NamedTuple

import torch
from torch import Tensor

from specdraft.decoding.sampling import sample
from specdraft.decoding.tree import DraftTree


class Verdict(NamedTuple):
    """How many nodes of the chain were accepted, and the correction or bonus token that follows them."""

    accepted: int
    next_token: int


def greedy(tree: DraftTree, best: Tensor) -> Verdict:
    """Accept the longest prefix of the chain that equals the target's own choices ``best [N + 1]`` (argmax ids).

    Comparing token ids, never probabilities, is what makes temperature 0 identical to plain greedy decoding.
    """
    choices, drafted = best.tolist(), tree.tokens.tolist()
    accepted = 0
    while accepted < len(drafted) and drafted[accepted] == choices[accepted]:
        accepted += 1
    return Verdict(accepted, choices[accepted])


def rejection_sampling(tree: DraftTree, p: Tensor, generator: torch.Generator | None) -> Verdict:
    """Speculative sampling of a chain (Leviathan et al. 2211.17192, algorithm 1; Chen et al. 2302.01318).

    p: ``[N + 1, V]``. A token x sampled from q is accepted with probability min(1, p(x) / q(x)); at the first
    rejection the correction is drawn from norm(max(p - q, 0)). A deterministic candidate (``tree.q`` is None) is the
    case q = point mass: accepted with probability p(x), else p without x. If all are accepted, a bonus comes from p.
    """
    uniform = torch.rand(len(tree), generator=generator, dtype=torch.float64, device=p.device)
    drafted = tree.tokens[:, None]
    p_drafted = p[:-1].gather(1, drafted)[:, 0]
    q_drafted = torch.ones_like(p_drafted) if tree.q is None else tree.q.gather(1, drafted)[:, 0]
    accepts = (uniform * q_drafted < p_drafted).tolist()
    for node, token in enumerate(tree.tokens.tolist()):
        if accepts[node]:
            continue
        if tree.q is None:
            residual = p[node].clone()
            residual[token] = 0.0
        else:
            residual = (p[node] - tree.q[node]).clamp_(min=0.0)
        if residual.sum() <= 0:  # p = q up to rounding: a rejection of probability about 1e-7 keeps p itself
            residual = p[node]
        return Verdict(node, int(sample(residual, generator)))
    return Verdict(len(tree), int(sample(p[len(tree)], generator)))
