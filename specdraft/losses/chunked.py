"""Distillation through a vocabulary projection without ever holding all its logits.

n = supervised positions of one step, R = positions of the flat batch, H = hidden size, V / Vd = target / draft
vocabulary, c = positions in a chunk.

Full logits are by far the largest tensors of a training step (1 GB for 2,048 positions of a 128k vocabulary in fp32,
for each step of the training-time test). Here the target's logits are made once per position, a chunk at a time, and
shared by all steps and heads that predict it; a chunk's gradient is taken while its logits are in memory. That is three
matrix products in all, as many as the plain loss needs; recomputing in backward would need four."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specdraft.losses.divergence import Distribution, Divergence, Draft, forward_kl
from specdraft.onednn import product

# Elements of a chunk of draft logits. Larger chunks take memory; smaller ones make the traffic of the weight gradient
# (Vd * H read and written per chunk) dominate. See benchmarks/train_step.py.
CHUNK_ELEMENTS = 128 * 32_768
_FEW = 256  # positions for which, on a CPU, adding a product to the weight's gradient takes longer than the product


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

    @torch.no_grad()
    def distribution(self, positions: Tensor, dtype: torch.dtype) -> Distribution:
        """The distributions at ``positions [c]``."""
        logits = self.logits(self.last[positions]).to(dtype)  # [c, V]
        if self.draft_ids is None:
            p, log_normalizer, best = softmax(logits, torch.empty_like(logits))
            mass = torch.ones_like(log_normalizer)
        else:
            best, outside = logits.argmax(-1), logits.logsumexp(-1)
            logits = logits.index_select(-1, self.draft_ids)  # [c, Vd]
            p, log_normalizer, _ = softmax(logits, torch.empty_like(logits))
            mass = (log_normalizer - outside).exp_()
        p_log_p = torch.linalg.vecdot(p, logits) - log_normalizer
        return Distribution(p, p_log_p, mass, best, None if self.labels is None else self._label(positions))

    def _label(self, positions: Tensor) -> Tensor:
        """The labels at ``positions [c]`` as draft ids, -1 outside the draft vocabulary."""
        assert self.labels is not None
        label = self.labels[positions]
        if self.draft_ids is None:
            return label
        index = torch.searchsorted(self.draft_ids, label).clamp_(max=len(self.draft_ids) - 1)
        return index.where(self.draft_ids[index] == label, -1)


@dataclass
class Step:
    """One drafting step: the inputs ``hidden [n, H]`` of the projection, the ascending ``positions [n]`` whose
    distribution they are to match, the ``weight`` of the step's mean in the loss, and which ``head`` projects it.
    ``total`` is what the sum over positions is divided by to make that mean, where they are part of a larger batch;
    None is their own number."""

    hidden: Tensor
    positions: Tensor
    weight: float
    head: int = 0
    total: float | None = None

    @property
    def scale(self) -> float:
        """What one position counts in the loss."""
        return self.weight / (self.total or max(1, len(self.positions)))


class FrozenHead(NamedTuple):
    """A projection that is not trained and may be more than a matrix, such as a target's own head with its soft-cap:
    ``logits`` ``[c, Vd]`` of hidden states ``[c, H]``, differentiable in them."""

    logits: Callable[[Tensor], Tensor]
    size: int


Head = Tensor | FrozenHead
"""What projects a step: a weight ``[Vd, H]``, or a frozen head of Vd tokens."""


@dataclass
class StepResult:
    """Sums over a step's n positions. ``alpha_sum``: sum of min(p, q) with p over the full vocabulary, the expected
    acceptance of a sampled draft token. ``mass_sum``: of what p gives to the draft vocabulary. ``matched [n]`` bool:
    the draft's best token is the target's best token."""

    loss_sum: Tensor
    alpha_sum: Tensor
    mass_sum: Tensor
    matched: Tensor


def softmax(logits: Tensor, out: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Softmax of ``logits [c, Vd]`` into ``out``, the log normalizer ``[c]`` and the argmax ``[c]``. Five passes over
    memory that is there already; torch's own functions would touch fresh pages in each."""
    largest, index = logits.max(-1)
    total = torch.sub(logits, largest[:, None], out=out).exp_().sum(-1)
    return out.div_(total[:, None]), largest + total.log(), index


def distillation_loss(
    weight: Tensor | Sequence[Head],
    teacher: Teacher,
    steps: Sequence[Step],
    divergence: Divergence = forward_kl,
    chunk_elements: int = CHUNK_ELEMENTS,
) -> tuple[Tensor, list[StepResult]]:
    """Sum over steps of ``step.weight`` times the mean divergence of its positions (none: zero); differentiable in the
    steps' hidden states and in ``weight [Vd, H]``, or in one of that shape per head. What is frozen costs no gradient.
    See ``tests/losses/reference.py`` for the same in a few lines."""
    weights = [weight] if isinstance(weight, Tensor) else list(weight)
    zero = torch.zeros((), dtype=_accumulator(steps[0].hidden), device=steps[0].hidden.device)
    results = [
        StepResult(zero.clone(), zero.clone(), zero.clone(), torch.zeros_like(step.positions, dtype=torch.bool))
        for step in steps
    ]
    hiddens = (step.hidden for step in steps)
    loss = _ChunkedDistillation.apply(teacher, steps, results, divergence, chunk_elements, *weights, *hiddens)
    return loss, results


def _accumulator(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


class _ChunkedDistillation(torch.autograd.Function):
    """Gradients are made in forward, scaled in backward."""

    @staticmethod
    def forward(
        ctx: Any,
        teacher: Teacher,
        steps: Sequence[Step],
        results: Sequence[StepResult],
        divergence: Divergence,
        chunk_elements: int,
        *heads_and_hiddens: Any,
    ) -> Tensor:
        weights: Sequence[Head] = heads_and_hiddens[: -len(steps)]
        size = len(weights[0]) if isinstance(weights[0], Tensor) else weights[0].size
        dtype, device = _accumulator(steps[0].hidden), steps[0].hidden.device
        trained = ctx.needs_input_grad[5:]  # a frozen head spares a third of the arithmetic
        grad_weights = [
            torch.zeros_like(weight, dtype=dtype) if isinstance(weight, Tensor) and learns else None
            for weight, learns in zip(weights, trained, strict=False)
        ]
        grad_hiddens = [torch.zeros_like(step.hidden) for step in steps]
        chunk = max(16, chunk_elements // size)
        positions = torch.unique(torch.cat([step.positions for step in steps]))  # ascending
        # Reused by every chunk: fresh pages of this size cost more than the arithmetic on them.
        spare = torch.empty((2, min(chunk, len(positions)), size), dtype=dtype, device=device)
        for window in positions.split(chunk):
            if len(window) == 0:  # no step has a position
                break
            target = teacher.distribution(window, dtype)
            first_and_end = torch.stack([window[0], window[-1] + 1])
            for step, result, grad_hidden in zip(steps, results, grad_hiddens, strict=True):
                low, high = torch.searchsorted(step.positions, first_and_end).tolist()
                if low == high:
                    continue
                at = target
                if high - low < len(window):  # not every position of the window is supervised in this step
                    at = target.at(torch.searchsorted(window, step.positions[low:high]))
                weight, grad_weight = weights[step.head], grad_weights[step.head]
                h = step.hidden[low:high]
                q, overlap = spare[:, : len(h)]  # [c, Vd] each
                if isinstance(weight, FrozenHead):
                    with torch.enable_grad():
                        h = h.detach().requires_grad_(step.hidden.requires_grad)
                        logits = weight.logits(h)
                else:
                    logits = product(h, weight)
                # Divergences may write into z, [c, Vd]; a frozen head's gradient may need what it gave.
                z = logits.detach().to(dtype, copy=isinstance(weight, FrozenHead))
                _, log_normalizer, drafted = softmax(z, out=q)
                drafted = drafted if teacher.draft_ids is None else teacher.draft_ids[drafted]
                result.matched[low:high] = drafted == at.best
                torch.mul(at.p, at.mass[:, None], out=overlap)
                alpha = torch.minimum(overlap, q, out=overlap).sum(-1)
                result.alpha_sum += alpha.sum()
                result.mass_sum += at.mass.sum()

                values, grad_z = divergence(Draft(z, log_normalizer, q, overlap, alpha), at)
                result.loss_sum += values.sum()
                grad_z = grad_z.mul_(step.scale).to(h.dtype)
                if isinstance(weight, FrozenHead):
                    if h.requires_grad:
                        (grad_hidden[low:high],) = torch.autograd.grad(logits, h, grad_z.to(logits.dtype))
                    continue
                grad_hidden[low:high] = product(grad_z, weight.to(h.dtype).T)
                if grad_weight is None:
                    continue
                if h.dtype == dtype and (len(h) < _FEW or device.type != "cpu"):
                    grad_weight.addmm_(grad_z.T, h)
                else:
                    grad_weight += product(grad_z.T, h.T)
        rounded = [
            g.to(w.dtype) if isinstance(w, Tensor) and g is not None else None
            for g, w in zip(grad_weights, weights, strict=True)
        ]
        ctx.save_for_backward(*rounded, *grad_hiddens)
        means = (result.loss_sum * step.scale for step, result in zip(steps, results, strict=True))
        return torch.stack(list(means)).sum()

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        gradients = (None if gradient is None else gradient * grad_loss for gradient in ctx.saved_tensors)
        return (*[None] * 5, *gradients)
