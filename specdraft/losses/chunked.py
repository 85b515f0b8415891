"""Distillation through a vocabulary projection without ever holding all its logits.

n = supervised positions of one step, R = positions of the flat batch, H = hidden size, V / Vd = target / draft
vocabulary, c = positions in a chunk: a window of the batch, or what a step supervises of it.

Full logits are by far the largest tensors of a training step (1 GB for 2,048 positions of a 128k vocabulary in fp32,
for each step of the training-time test). Here the target's logits are made once per position, a chunk at a time, and
shared by all steps and heads that predict it; a chunk's gradient is taken while its logits are in memory. That is three
matrix products in all, as many as the plain loss needs; recomputing in backward would need four."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from specdraft.losses.comparison import comparison
from specdraft.losses.divergence import Divergence, forward_kl
from specdraft.losses.windows import Windows, window_size
from specdraft.onednn import is_faster, product

_ROWS = 1024  # of a weight's gradient to which a product is added at a time that cannot be added where it is made


@dataclass
class Teacher:
    """The target's distribution at any position of the flattened batch.
    last: ``[R, H]`` hidden states after the final norm. logits: the target's own head. draft_ids: ``[Vd]`` the
    ascending target ids of the draft vocabulary, or None where it is the whole vocabulary. labels: ``[R]`` the true
    token after each position, for divergences that learn from it."""

    last: Tensor
    logits: Callable[[Tensor], Tensor]
    draft_ids: Tensor | None
    labels: Tensor | None = None

    def label(self, positions: Tensor) -> Tensor | None:
        """The labels at ``positions [c]`` as draft ids, -1 outside the draft vocabulary; None where there are none."""
        if self.labels is None or self.draft_ids is None:
            return None if self.labels is None else self.labels[positions]
        label = self.labels[positions]
        index = torch.searchsorted(self.draft_ids, label).clamp_(max=len(self.draft_ids) - 1)
        return index.where(self.draft_ids[index] == label, -1)


class Correction(NamedTuple):
    """Logits that are added to a step's: the inputs ``hidden [n, r]`` of a second projection, and which ``head`` it is,
    a weight ``[Vd, r]``."""

    hidden: Tensor
    head: int


@dataclass
class Step:
    """One drafting step: the inputs ``hidden [n, H]`` of the projection, the ascending ``positions [n]`` whose
    distribution they are to match, the ``weight`` of the step's mean in the loss, and which ``head`` projects it.
    ``total`` is what the sum over positions is divided by to make that mean, where they are part of a larger batch;
    None is their own number. ``shares [n]`` is what each counts in that sum, without a gradient; None is one each.
    ``correction``: what else the logits are the sum of; a step of a ``FrozenHead`` has none."""

    hidden: Tensor
    positions: Tensor
    weight: float
    head: int = 0
    total: float | None = None
    shares: Tensor | None = None
    correction: Correction | None = None

    @property
    def terms(self) -> list[tuple[Tensor, int]]:
        """What is projected, and by which head; the logits are the sum of all."""
        return [(self.hidden, self.head), *([] if self.correction is None else [self.correction])]

    @property
    def scale(self) -> float:
        """What a position whose share is one counts in the loss."""
        return self.weight / (self.total or max(1, len(self.positions)))

    def shared(self, values: Tensor, low: int = 0, high: int | None = None) -> Tensor:
        """Values ``[c, ...]`` of the positions from ``low`` to ``high``, times their shares."""
        if self.shares is None:
            return values
        shares = self.shares[low:high].to(values.dtype)
        return values * shares.view(-1, *[1] * (values.ndim - 1))


class FrozenHead(NamedTuple):
    """A projection that is not trained and may be more than a matrix, such as a target's own head with its soft-cap:
    ``logits`` ``[c, Vd]`` of hidden states ``[c, H]``, differentiable in them."""

    logits: Callable[[Tensor], Tensor]
    size: int


Head = Tensor | FrozenHead
"""What projects a step: a weight ``[Vd, H]``, or a frozen head of Vd tokens."""


@dataclass
class StepResult:
    """Of a step's n positions, whatever their shares. ``loss_sum``: of the divergence. ``alpha [n]``: sum of min(p, q)
    with p over the full vocabulary, the expected acceptance of a sampled draft token. ``mass_sum``: of what p gives to
    the draft vocabulary. ``matched [n]`` bool: the draft's best token is the target's best token."""

    loss_sum: Tensor
    alpha: Tensor
    mass_sum: Tensor
    matched: Tensor

    @property
    def alpha_sum(self) -> Tensor:
        """Of all positions."""
        return self.alpha.sum()


Watcher = Callable[[Sequence[Head], Teacher, Sequence[Step]], None]
"""Is shown what a loss compares, before it does."""

_watcher: ContextVar[Watcher | None] = ContextVar("watcher", default=None)


@contextmanager
def watched(watcher: Watcher) -> Iterator[None]:
    """Show every ``distillation_loss`` inside to ``watcher``: what a drafter is trained on is seen in no other way, as
    its logits are never all there."""
    before = _watcher.set(watcher)
    try:
        yield
    finally:
        _watcher.reset(before)


def distillation_loss(
    weight: Tensor | Sequence[Head],
    teacher: Teacher,
    steps: Sequence[Step],
    divergence: Divergence = forward_kl,
    size: int | None = None,
) -> tuple[Tensor, list[StepResult]]:
    """Sum over steps of ``step.weight`` times the mean divergence of its positions (none: zero), each times its share;
    differentiable in the steps' hidden states, those of their corrections, and in ``weight [Vd, H]``, or in one per
    head. What is frozen costs no gradient. Products take their operands in autocast's dtype and are summed in fp32;
    ``size`` is the positions of a window, by default what suits the device. See ``tests/losses/reference.py`` for the
    same in a few lines."""
    weights = [weight] if isinstance(weight, Tensor) else list(weight)
    if (watcher := _watcher.get()) is not None:
        watcher(weights, teacher, steps)
    tensors = [*weights, *(hidden for step in steps for hidden, _ in step.terms)]
    if not torch.is_grad_enabled():  # a validation: autograd would ask for gradients all the same
        tensors = [tensor.detach() if isinstance(tensor, Tensor) else tensor for tensor in tensors]
    results: list[StepResult] = []
    loss = _ChunkedDistillation.apply(teacher, steps, results, divergence, size, *tensors)
    return loss, results


class _ChunkedDistillation(torch.autograd.Function):
    """Gradients are made in forward, scaled in backward."""

    @staticmethod
    def forward(
        ctx: Any,
        teacher: Teacher,
        steps: Sequence[Step],
        results: list[StepResult],
        divergence: Divergence,
        size: int | None,
        *tensors: Any,
    ) -> Tensor:
        heads: Sequence[Head] = tensors[: -sum(len(step.terms) for step in steps)]
        learns = iter(ctx.needs_input_grad[5:])
        vocabulary = len(heads[0]) if isinstance(heads[0], Tensor) else heads[0].size
        device, operand = steps[0].hidden.device, _operand_dtype(steps[0].hidden)
        zero = torch.zeros((), dtype=torch.promote_types(operand, torch.float32), device=device)
        grad_weights = [  # a frozen head spares a third of the arithmetic
            torch.zeros_like(head, dtype=zero.dtype) if isinstance(head, Tensor) and learned else None
            for head, learned in [(head, next(learns)) for head in heads]
        ]
        grad_hiddens = [  # of every step's terms
            [torch.empty_like(hidden) if next(learns) else None for hidden, _ in step.terms] for step in steps
        ]
        operands = [head.to(operand) if isinstance(head, Tensor) else head for head in heads]
        windows = Windows(
            [step.positions for step in steps], len(teacher.last), size or window_size(vocabulary, device)
        )
        compare = comparison(divergence, min(windows.size, len(windows.positions)), vocabulary, zero.dtype, device)
        none = zero.new_empty(0)
        targets = [(none.long(), none)]  # best and mass of each window
        drafts = [[(none, none, none.long())] for _ in steps]  # values, alpha and best token of each chunk
        for positions, parts in windows:
            target = compare.target(
                teacher.logits(teacher.last[positions]), teacher.draft_ids, teacher.label(positions)
            )
            targets.append((target.best, target.mass))
            for step, part, draft, grad_terms in zip(steps, parts, drafts, grad_hiddens, strict=True):
                if part is None:
                    continue
                low, high, places = part
                if isinstance(head := operands[step.head], FrozenHead):
                    (grad_hidden,), h = grad_terms, step.hidden[low:high]
                    with torch.enable_grad():
                        h.requires_grad_(grad_hidden is not None)
                        z = head.logits(h)
                    compared = compare.draft(z, target, places, keep=True)
                    if grad_hidden is not None:
                        (grad_hidden[low:high],) = torch.autograd.grad(z, h, compared.grad)
                else:
                    given = [hidden[low:high].to(operand) for hidden, _ in step.terms]
                    added = [cast("Tensor", operands[number]) for _, number in step.terms]
                    z = product(given[0], added[0])
                    for h, weight in zip(given[1:], added[1:], strict=True):
                        z.addmm_(h, weight.T)  # no second tensor of the size of the logits
                    compared = compare.draft(z, target, places, keep=False)
                    for h, weight, (_, number), grad_hidden in zip(given, added, step.terms, grad_terms, strict=True):
                        if grad_hidden is not None:
                            grad_hidden[low:high] = product(compared.grad, weight.T)
                        if (grad_weight := grad_weights[number]) is not None:
                            _add_product(grad_weight, compared.grad, step.shared(h, low, high), step.scale)
                draft.append((compared.values, compared.alpha, compared.drafted))
                del z, compared  # before the next ones are made
            del target
        best, mass = (torch.cat(column) for column in zip(*targets, strict=True))
        means = []
        for step, chunks, ranks in zip(steps, drafts, windows.ranks, strict=True):
            values, alpha, drafted = (torch.cat(column) for column in zip(*chunks, strict=True))
            drafted = drafted if teacher.draft_ids is None else teacher.draft_ids[drafted]
            results.append(StepResult(values.sum(), alpha, mass[ranks].sum(), drafted == best[ranks]))
            means.append(step.shared(values).sum() * step.scale)
        rounded = [
            gradient.to(head.dtype) if isinstance(head, Tensor) and gradient is not None else None
            for gradient, head in zip(grad_weights, heads, strict=True)
        ]
        shared = [
            None if gradient is None else step.shared(gradient).mul_(step.scale)
            for step, gradients in zip(steps, grad_hiddens, strict=True)
            for gradient in gradients
        ]
        ctx.gradients = [*rounded, *shared]
        return torch.stack(means).sum()

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        if (gradients := ctx.gradients) is None:
            raise RuntimeError("the gradients of a distillation loss can be asked for once only")
        ctx.gradients = None  # they are scaled where they are: a projection's is as large as the projection
        return (*[None] * 5, *(None if gradient is None else gradient.mul_(grad_loss) for gradient in gradients))


def _operand_dtype(hidden: Tensor) -> torch.dtype:
    """What products are computed in. Autocast does not reach those that write into a given tensor."""
    kind = hidden.device.type
    cast = torch.is_autocast_enabled(kind) and hidden.dtype != torch.float64
    return torch.get_autocast_dtype(kind) if cast else hidden.dtype


def _add_product(total: Tensor, a: Tensor, b: Tensor, scale: float) -> None:
    """``total [Vd, H] += scale * a.T @ b`` of ``a [c, Vd]`` and ``b [c, H]``, with no other tensor of its size."""
    if a.dtype == total.dtype and not (a.device.type == "cpu" and is_faster()):
        total.addmm_(a.T, b, alpha=scale)
    elif _adds_wider(a.device):
        torch.addmm(total, a.T, b, out_dtype=total.dtype, alpha=scale, out=total)
    else:
        for rows, columns in zip(total.split(_ROWS), a.T.split(_ROWS), strict=True):
            rows.add_(product(columns.contiguous(), b.T), alpha=scale)  # oneDNN reads such columns slowly


def _adds_wider(device: torch.device) -> bool:
    """Whether a product of bf16 operands is added to an fp32 tensor where it is made: by cuBLAS since Ampere."""
    return device.type == "cuda" and bool(torch.version.cuda) and torch.cuda.get_device_capability(device) >= (8, 0)
