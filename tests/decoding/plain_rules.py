"""Rejection sampling on trees token by token in Python, right or with one line of it gone wrong."""

from collections.abc import Sequence

import torch
from torch import Tensor

from specdraft.decoding.rules import Rule, Verdict
from specdraft.decoding.tree import ROOT, DraftTrees
from tests.decoding.trees import shared_out


def draw(weights: Sequence[float], uniform: float) -> int:
    """The token at ``uniform`` of the cumulated weights."""
    left = uniform * sum(weights)
    for token, weight in enumerate(weights):
        if left < weight:
            return token
        left -= weight
    return max(token for token, weight in enumerate(weights) if weight)  # by rounding alone


def plain(fault: str = "none") -> Rule:
    """The rule of SpecInfer, one request after the other, from the same numbers."""

    def one(
        tokens: list[int],
        parents: list[int],
        q: list[list[float]],
        alive: list[bool],
        p: list[list[float]],
        u: list[float],
        last: float,
    ) -> tuple[list[int], int]:
        path: list[int] = []
        here, residual = ROOT, p[0]
        while True:
            below = [node for node, parent in enumerate(parents) if parent == here and alive[node]]
            for child in below:
                token = tokens[child]
                drawn_from = q[below[0]] if fault == "q of the first sibling" else q[child]
                ratio = residual[token] / (1.0 if fault == "q is forgotten" else drawn_from[token])
                if fault == "accepts the first" or u[child] < ratio:
                    path.append(child)
                    here = child
                    if fault != "residual goes down":
                        residual = p[0] if fault == "p of the root" else p[here + 1]
                    break
                left = [max(a - b, 0.0) for a, b in zip(residual, drawn_from, strict=True)]
                if fault == "siblings see p":
                    left = residual
                elif fault == "only the token goes":
                    left = [0.0 if other == token else weight for other, weight in enumerate(residual)]
                total = sum(left) if fault != "not renormalized" else 1.0
                residual = [weight / total for weight in left] if sum(left) > 0 else residual
            else:
                if fault == "correction from p":
                    residual = p[here + 1]
                elif fault == "bonus a row too early" and not below and path:
                    residual = p[parents[here] + 1]
                return path, draw(residual, last)

    def rule(trees: DraftTrees, p: Tensor, uniform: Tensor) -> Verdict:
        q = torch.nn.functional.one_hot(trees.tokens, p.shape[-1]).float() if trees.q is None else trees.q
        alive = torch.ones_like(trees.tokens, dtype=torch.bool) if trees.alive is None else trees.alive
        rows = (part.tolist() for part in (trees.tokens, trees.parents, q, alive, p, *shared_out(uniform)))
        found = [one(*row) for row in zip(*rows, strict=True)]
        paths = torch.tensor([(path + [0] * trees.depth)[: trees.depth] for path, _ in found])
        return Verdict(paths, torch.tensor([len(path) for path, _ in found]), torch.tensor([t for _, t in found]))

    return rule
