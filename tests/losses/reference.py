"""The losses in plain formulas, every logit at once, gradients by autograd: what the chunked ones must equal.

n = rows of a step, Vd = draft vocabulary. A formula makes values ``[n]`` of log p and log q ``[n, Vd]``, p renormalized
over the draft vocabulary, p's mass ``[n]`` there, and the labels ``[n]`` as draft ids, -1 outside.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.functional import kl_div, linear, nll_loss

from specdraft.losses.chunked import Step, Teacher

Formula = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]


def forward_kl(log_p: Tensor, log_q: Tensor, mass: Tensor, label: Tensor | None) -> Tensor:
    """KL(p, q)."""
    return kl_div(log_q, log_p, log_target=True, reduction="none").sum(-1)


def reverse_kl(log_p: Tensor, log_q: Tensor, mass: Tensor, label: Tensor | None) -> Tensor:
    """KL(q, p)."""
    return kl_div(log_p, log_q, log_target=True, reduction="none").sum(-1)


def jsd(beta: float) -> Formula:
    """Generalized Jensen-Shannon divergence."""

    def formula(log_p: Tensor, log_q: Tensor, mass: Tensor, label: Tensor | None) -> Tensor:
        log_m = (beta * log_p.exp() + (1 - beta) * log_q.exp()).log()
        return beta * forward_kl(log_p, log_m, mass, label) + (1 - beta) * forward_kl(log_q, log_m, mass, label)

    return formula


def total_variation(log_p: Tensor, log_q: Tensor, mass: Tensor, label: Tensor | None) -> Tensor:
    """Half the L1 distance of q from the true p, whose tokens outside the draft vocabulary q does not know."""
    inside = (mass[:, None] * log_p.exp() - log_q.exp()).abs().sum(-1)
    return (inside + 1 - mass) / 2


def lk_hybrid(eta: float) -> Formula:
    """KL and total variation mixed by the acceptance, which is taken as it is."""

    def formula(log_p: Tensor, log_q: Tensor, mass: Tensor, label: Tensor | None) -> Tensor:
        tv = total_variation(log_p, log_q, mass, label)
        share = torch.exp(-eta * (1 - tv.detach()))
        return share * forward_kl(log_p, log_q, mass, label) + (1 - share) * tv

    return formula


def cross_entropy(log_p: Tensor, log_q: Tensor, mass: Tensor, label: Tensor | None) -> Tensor:
    """-log q(label), zero for a label outside."""
    assert label is not None
    return nll_loss(log_q, label, ignore_index=-1, reduction="none")


def ce_l1(share: float) -> Formula:
    """Cross entropy and L1 distance, which is twice the total variation."""

    def formula(log_p: Tensor, log_q: Tensor, mass: Tensor, label: Tensor | None) -> Tensor:
        distance = 2 * total_variation(log_p, log_q, mass, label)
        return share * cross_entropy(log_p, log_q, mass, label) + (1 - share) * distance

    return formula


def reference_loss(
    weight: Tensor | Sequence[Tensor], teacher: Teacher, steps: Sequence[Step], formula: Formula = forward_kl
) -> Tensor:
    """``distillation_loss``."""
    weights = [weight] if isinstance(weight, Tensor) else weight
    ids = slice(None) if teacher.draft_ids is None else teacher.draft_ids
    total = weights[0].new_zeros(())
    for step in steps:
        if len(step.positions) == 0:
            continue
        logits = teacher.logits(teacher.last[step.positions]).detach()  # [n, V]
        log_p = logits[:, ids].log_softmax(-1)
        mass = logits.softmax(-1)[:, ids].sum(-1)
        z = torch.stack([linear(hidden, weights[head]) for hidden, head in step.terms]).sum(0)
        log_q = z.log_softmax(-1)
        label = None
        if teacher.labels is not None:
            inverse = torch.full((logits.shape[-1],), -1, device=logits.device)
            inverse[ids] = torch.arange(log_q.shape[-1], device=logits.device)
            label = inverse[teacher.labels[step.positions]]
        values = formula(log_p, log_q, mass, label)  # [n]
        values = values if step.shares is None else values * step.shares
        total = total + step.weight * values.sum() / (step.total or len(values))
    return total
