"""What a drafted position is worth: weights from the draft's own confidence in place of a fixed decay (D-PACE,
2605.18810, equations 7 and 8, carried from blocks to unrolled steps).

n = supervised positions of a step.

With a_s the acceptance of step s in the chain that starts at a position, as many of its tokens are accepted as

    E = sum over m of a_0 ... a_m        dE = sum over s of w_s dlog(a_s),        w_s = sum over m >= s of a_0 ... a_m

so w_s is what a little more acceptance at step s is worth. Early steps weigh most, later ones the more the surer the
draft is until there. A chain that its document cuts short ends there: what would follow is no miss."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from specdraft.errors import UserError
from specdraft.losses.chunked import Head, Step, Teacher, distillation_loss


def check_smoothing(smoothing: float | None, sample_positions: bool) -> None:
    """Raises UserError for what is neither None nor a share, and where the decay that it replaces is to sample."""
    if smoothing is None:
        return
    if not (isinstance(smoothing, int | float) and 0 <= smoothing <= 1):
        wanted = "null (a fixed decay) or a number from 0 to 1, 0.5 say"
        raise UserError(f"model.drafter.confidence_smoothing is {smoothing}: expected {wanted}")
    if sample_positions:
        wanted = "sample_positions=false, as weights from confidence need whole chains"
        raise UserError(f"model.drafter.confidence_smoothing is {smoothing}: expected {wanted}")


def weigh_by_confidence(
    weights: Tensor | Sequence[Head], teacher: Teacher, steps: Sequence[Step], smoothing: float
) -> list[Step]:
    """The unrolled steps with w_s as each position's share, in place of the step's weight. All are divided by the first
    step's total, so that a chain counts as much as it may accept. Acceptances are taken as ``smoothing`` + (1 -
    ``smoothing``) a, for a draft that accepts nothing yet would learn nothing but the first step. Costs a pass over the
    logits without gradients."""
    with torch.no_grad():
        _, results = distillation_loss(weights, teacher, steps)
    reached: list[Tensor] = []  # a_0 ... a_s, [n] each
    kept: list[Tensor] = []  # where the chains of a step are among those of the step before, [n] each
    for index, result in enumerate(results):
        alpha = smoothing + (1 - smoothing) * result.alpha
        if index > 0:  # they only ever get fewer
            kept.append(torch.searchsorted(steps[index - 1].positions + 1, steps[index].positions))
            alpha = alpha * reached[-1][kept[-1]]
        reached.append(alpha)
    worth = reached.copy()
    for index in reversed(range(len(kept))):
        worth[index] = worth[index].index_add(0, kept[index], worth[index + 1])
    first = steps[0]
    total = first.total or max(1, len(first.positions))
    shares = first.shares if first.shares is not None else torch.ones_like(worth[0])  # of the chains
    weighed = []
    for index, step in enumerate(steps):
        shares = shares if index == 0 else shares[kept[index - 1]]
        weighed.append(replace(step, weight=first.weight, total=total, shares=worth[index] * shares))
    return weighed
