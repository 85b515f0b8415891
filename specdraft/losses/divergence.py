"""Divergences between a target distribution p and a draft distribution q = softmax(z), with their gradients in z.

c = positions of a chunk, Vd = draft vocabulary. Value and gradient come together because the chunked loss needs the
gradient while the logits of a chunk are in memory; the same in plain formulas is in ``tests/losses/reference.py``.

| name | value | |
|---|---|---|
| ``forward_kl`` | KL(p, q) | the default: covers all that the target may say |
| ``reverse_kl`` | KL(q, p) | seeks one thing that the target says |
| ``jsd`` | beta KL(p, m) + (1 - beta) KL(q, m), m = beta p + (1 - beta) q | between the two (GKD, 2306.13649) |
| ``total_variation`` | 1 - alpha | the rejection rate itself; its gradient vanishes far from p |
| ``lk_hybrid`` | lambda KL(p, q) + (1 - lambda) (1 - alpha) | KL early, total variation late (LK, 2602.23881) |
| ``cross_entropy`` | -log q(label) | against the true next token instead of the target's distribution |
| ``ce_l1`` | s -log q(label) + (1 - s) sum abs(p - q) | the text and the acceptance at once (DSpark, 2607.05147) |

With a pruned vocabulary the first three compare q with p renormalized over it. The expected acceptance alpha = sum
min(p, q) and the total variation are against the true p: tokens outside the draft vocabulary are lost."""

from collections.abc import Mapping
from dataclasses import astuple, dataclass, fields
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from specdraft.errors import UserError


class Distribution(NamedTuple):
    """The target at c positions: p ``[c, Vd]`` renormalized over the draft vocabulary, sum p log p ``[c]``, the mass
    ``[c]`` that the full distribution gives to the draft vocabulary, the best token ``[c]`` of the full vocabulary, and
    the draft id ``[c]`` of the true next token (-1: outside the draft vocabulary), or None where it is not known."""

    p: Tensor
    p_log_p: Tensor
    mass: Tensor
    best: Tensor
    label: Tensor | None = None

    def at(self, index: Tensor | slice) -> "Distribution":
        """Only the positions ``index [n]``, or a slice of them."""
        return Distribution._make(None if field is None else field[index] for field in self)


class Draft(NamedTuple):
    """The draft at the same positions: logits z ``[c, Vd]``, their log normalizer ``[c]``, q = softmax(z) ``[c, Vd]``,
    overlap = min(mass p, q) ``[c, Vd]`` and its sum alpha ``[c]``, the expected acceptance."""

    z: Tensor
    log_normalizer: Tensor
    q: Tensor
    overlap: Tensor
    alpha: Tensor


class Compared(NamedTuple):
    """Of a chunk: the divergence's values ``[c]``, alpha ``[c]``, the draft's best token ``[c]`` as a draft id, and the
    values' gradient in the logits ``[c, Vd]``, in their dtype."""

    values: Tensor
    alpha: Tensor
    drafted: Tensor
    grad: Tensor


class Divergence(Protocol):
    """A divergence of the draft from the target."""

    def __call__(self, draft: Draft, target: Distribution) -> tuple[Tensor, Tensor]:
        """Values ``[c]`` (KL and JSD in nats) and the gradient in z ``[c, Vd]``. The draft's z, q and overlap may be
        overwritten; the target, shared by all steps, may not. A gradient that is written over z need not be copied."""


def forward_kl(draft: Draft, target: Distribution) -> tuple[Tensor, Tensor]:
    """KL(p, q) = sum p log p - sum p z + logsumexp(z); the gradient is q - p."""
    return _forward_kl(draft, target), torch.sub(draft.q, target.p, out=draft.z)


def reverse_kl(draft: Draft, target: Distribution) -> tuple[Tensor, Tensor]:
    """KL(q, p) = sum q d with d = log q - log p; the gradient is q (d - sum q d)."""
    return _kl_from_q(draft, _log(draft.overlap.copy_(target.p)))


@dataclass(frozen=True)
class Jsd:
    """Generalized Jensen-Shannon divergence: the symmetric one at ``beta`` 0.5; beta times the forward KL for small
    beta, 1 - beta times the reverse KL for beta near 1."""

    beta: float = 0.5

    def __post_init__(self) -> None:
        if not (isinstance(self.beta, int | float) and 0 < self.beta < 1):
            raise UserError(f"the divergence jsd's beta is {self.beta}: expected a number above 0 and below 1")

    def __call__(self, draft: Draft, target: Distribution) -> tuple[Tensor, Tensor]:
        """The gradient is (1 - beta) q (d - sum q d) with d = log q - log m."""
        log_m = _log(torch.lerp(draft.q, target.p, self.beta, out=draft.overlap))
        forward = target.p_log_p - torch.linalg.vecdot(target.p, log_m)
        reverse, grad_z = _kl_from_q(draft, log_m)
        return self.beta * forward + (1 - self.beta) * reverse, grad_z.mul_(1 - self.beta)


def total_variation(draft: Draft, target: Distribution) -> tuple[Tensor, Tensor]:
    """1 - alpha; see ``_acceptance_slope`` for the gradient."""
    return 1 - draft.alpha, torch.mul(draft.q, _acceptance_slope(draft), out=draft.z)


@dataclass(frozen=True)
class LkHybrid:
    """lambda KL + (1 - lambda) TV with lambda = exp(-``eta`` alpha) at each position, a constant to the gradient. The
    paper takes 3, and 10 for Medusa's heads."""

    eta: float = 3.0

    def __post_init__(self) -> None:
        if not (isinstance(self.eta, int | float) and self.eta >= 0):
            raise UserError(f"the divergence lk_hybrid's eta is {self.eta}: expected 0 (KL alone) or a positive number")

    def __call__(self, draft: Draft, target: Distribution) -> tuple[Tensor, Tensor]:
        """The gradient is lambda (q - p) + (1 - lambda) times total variation's."""
        share = (-self.eta * draft.alpha).exp_()  # lambda [c]
        values = torch.lerp(1 - draft.alpha, _forward_kl(draft, target), share)
        slope = _acceptance_slope(draft).mul_((1 - share)[:, None]).add_(share[:, None])
        return values, torch.mul(draft.q, slope, out=draft.z).addcmul_(target.p, share[:, None], value=-1)


def cross_entropy(draft: Draft, target: Distribution) -> tuple[Tensor, Tensor]:
    """-log q(label); the gradient is q minus one at the label. A label outside the draft vocabulary adds nothing.
    Raises UserError where the drafter gives no labels."""
    given = wants_labels(target.label)
    known, label = given >= 0, given.clamp(min=0)[:, None]
    values = draft.log_normalizer - draft.z.gather(-1, label)[:, 0]
    grad_z = draft.q.scatter_add_(-1, label, torch.full_like(values, -1)[:, None])
    return values.where(known, 0), torch.mul(grad_z, known[:, None], out=draft.z)


def wants_labels(label: Tensor | None) -> Tensor:
    """The labels. Raises UserError where there are none."""
    if label is None:
        wrong = "this drafter has no true next tokens, which the divergences cross_entropy and ce_l1 learn from"
        raise UserError(f"{wrong}: expected another divergence; choose forward_kl")
    return label


@dataclass(frozen=True)
class CeL1:
    """``share`` of the cross entropy with the true next token, and the rest of the L1 distance of p and q over the full
    vocabulary, which is twice the total variation. The paper takes 0.1."""

    share: float = 0.1

    def __post_init__(self) -> None:
        if not (isinstance(self.share, int | float) and 0 <= self.share <= 1):
            raise UserError(f"the divergence ce_l1's share is {self.share}: expected a number from 0 to 1")

    def __call__(self, draft: Draft, target: Distribution) -> tuple[Tensor, Tensor]:
        """The gradient is the sum of both, so weighed; a label outside the draft vocabulary adds nothing. Raises
        UserError where the drafter gives no labels."""
        given = wants_labels(target.label)
        known, label = given >= 0, given.clamp(min=0)[:, None]
        entropy = (draft.log_normalizer - draft.z.gather(-1, label)[:, 0]).where(known, 0)
        values = self.share * entropy + 2 * (1 - self.share) * (1 - draft.alpha)
        share = known.to(draft.q.dtype).mul_(self.share)  # [c]
        slope = _acceptance_slope(draft).mul_(2 * (1 - self.share)).add_(share[:, None])
        grad_z = torch.mul(draft.q, slope, out=draft.z)
        return values, grad_z.scatter_add_(-1, label, -share[:, None])


def divergence(spec: str | Mapping[str, Any]) -> Divergence:
    """The divergence of that name, or ``{"name": name, option: value}``. Raises UserError for unknown ones."""
    options = dict(spec) if isinstance(spec, Mapping) else {"name": spec}
    name = options.pop("name", None)
    if name not in DIVERGENCES:
        raise UserError(f"the divergence is {name!r}: expected one of {', '.join(DIVERGENCES)}")
    found = DIVERGENCES[name]
    known = [field.name for field in fields(found)] if isinstance(found, type) else []
    for option in options:
        if option not in known:
            raise UserError(f"the divergence {name} has no option {option!r}: expected {', '.join(known) or 'none'}")
    return found(**options) if isinstance(found, type) else found


DIVERGENCES: dict[str, Divergence | type[Jsd] | type[LkHybrid] | type[CeL1]] = {
    "forward_kl": forward_kl,
    "reverse_kl": reverse_kl,
    "jsd": Jsd,
    "total_variation": total_variation,
    "lk_hybrid": LkHybrid,
    "cross_entropy": cross_entropy,
    "ce_l1": CeL1,
}


def kind(divergence: Divergence) -> tuple[str, float] | None:
    """Name and option of one of ``DIVERGENCES``, which kernels know; None for others."""
    for name, known in DIVERGENCES.items():
        if divergence is known:
            return name, 0.0
        if isinstance(known, type) and type(divergence) is known:
            return name, float(astuple(divergence)[0])
    return None


def _forward_kl(draft: Draft, target: Distribution) -> Tensor:
    return target.p_log_p - torch.linalg.vecdot(target.p, draft.z) + draft.log_normalizer


def _kl_from_q(draft: Draft, log_r: Tensor) -> tuple[Tensor, Tensor]:
    """KL(q, r) = sum q d with d = log q - log r, and its gradient q (d - sum q d) at a fixed r; overwrites z."""
    d = draft.z.sub_(draft.log_normalizer[:, None]).sub_(log_r)
    values = torch.linalg.vecdot(draft.q, d)
    return values, d.sub_(values[:, None]).mul_(draft.q)


def _acceptance_slope(draft: Draft) -> Tensor:
    """What q is to be multiplied by to give the gradient of 1 - alpha; overwrites overlap. alpha follows q where q is
    the smaller one. With s = 1 there, else 0, that gradient is q (sum q s - s)."""
    smaller = draft.overlap.eq_(draft.q)
    total = torch.linalg.vecdot(draft.q, smaller)
    return smaller.neg_().add_(total[:, None])


def _log(probabilities: Tensor) -> Tensor:
    # What underflowed to zero counts as the smallest normal number: its log must stay finite, for 0 * inf is nan.
    return probabilities.clamp_(min=torch.finfo(probabilities.dtype).tiny).log_()
