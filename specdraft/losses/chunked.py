"""Distillation through a vocabulary projection without ever holding all its logits.

n = supervised rows of one step, H = hidden size, V / Vd = target / draft vocabulary, c = positions in a chunk.

Full logits are by far the largest tensors of a training step (1 GB for 2,048 positions of a 128k vocabulary in fp32,
for each step of the training-time test). Here the target's logits are made once per position, a chunk at a time, and
shared by all steps that predict it; a chunk's gradient is taken while its logits are in memory. That is three matrix
products in all, as many as the plain loss needs; recomputing in backward would need four.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specdraft.losses.divergence import Divergence, Draft, forward_kl

# Elements of a chunk of draft logits. Larger chunks take memory; smaller ones make the traffic of the weight gradient
# (Vd * H read and written per chunk) dominate. See benchmarks/train_step.py.
CHUNK_ELEMENTS = 128 * 32_768


class Distribution(NamedTuple):
    """The target at c positions: p ``[c, Vd]`` renormalised over the draft vocabulary, sum p log p ``[c]``, the mass
    ``[c]`` that the full distribution gives to the draft vocabulary, the best token ``[c]`` of the full vocabulary."""

    p: Tensor
    p_log_p: Tensor
    mass: Tensor
    best: Tensor


@dataclass
class Teacher:
    """The target's distribution at any position of the flattened batch.

    last: ``[R, H]`` hidden states after the final norm. logits: the target's own head. draft_ids: ``[Vd]`` the target
    ids of the draft vocabulary, or None where it is the whole vocabulary.
    """

    last: Tensor
    logits: Callable[[Tensor], Tensor]
    draft_ids: Tensor | None

    @torch.no_grad()
    def distribution(self, positions: Tensor, dtype: torch.dtype) -> Distribution:
        """The distributions at ``positions [c]``."""
        logits = self.logits(self.last[positions]).to(dtype)  # [c, V]
        if self.draft_ids is None:
            p, log_normaliser, best = softmax(logits, torch.empty_like(logits))
            mass = torch.ones_like(log_normaliser)
        else:
            best, outside = logits.argmax(-1), logits.logsumexp(-1)
            logits = logits.index_select(-1, self.draft_ids)  # [c, Vd]
            p, log_normaliser, _ = softmax(logits, torch.empty_like(logits))
            mass = (log_normaliser - outside).exp_()
        p_log_p = torch.linalg.vecdot(p, logits) - log_normaliser
        return Distribution(p, p_log_p, mass, best)


@dataclass
class Step:
    """One step of the training-time test: the head's inputs ``hidden [n, H]``, the ascending ``positions [n]`` whose
    distribution they are to match, and the ``weight`` of the step's mean in the loss."""

    hidden: Tensor
    positions: Tensor
    weight: float


@dataclass
class StepResult:
    """Sums over a step's n rows. ``alpha_sum``: sum of min(p, q) with p over the full vocabulary, the expected
    acceptance of a sampled draft token. ``matched [n]`` bool: the draft's best token is the target's best token."""

    loss_sum: Tensor
    alpha_sum: Tensor
    matched: Tensor


def softmax(logits: Tensor, out: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Softmax of ``logits [c, Vd]`` into ``out``, the log normaliser ``[c]`` and the argmax ``[c]``.

    Five passes over memory that is there already; torch's own functions would touch fresh pages in each.
    """
    largest, index = logits.max(-1)
    total = torch.sub(logits, largest[:, None], out=out).exp_().sum(-1)
    return out.div_(total[:, None]), largest + total.log(), index


def distillation_loss(
    weight: Tensor,
    teacher: Teacher,
    steps: Sequence[Step],
    divergence: Divergence = forward_kl,
    chunk_elements: int = CHUNK_ELEMENTS,
) -> tuple[Tensor, list[StepResult]]:
    """Sum over steps of ``step.weight`` times the mean divergence of its rows; differentiable in ``weight [Vd, H]``
    and in the steps' hidden states.

    A step without rows adds zero. See ``reference_loss`` for the same in a few lines.
    """
    zero = torch.zeros((), dtype=torch.promote_types(weight.dtype, torch.float32), device=weight.device)
    results = [
        StepResult(zero.clone(), zero.clone(), torch.zeros_like(step.positions, dtype=torch.bool)) for step in steps
    ]
    loss = _ChunkedDistillation.apply(
        weight, teacher, steps, results, divergence, chunk_elements, *(step.hidden for step in steps)
    )
    return loss, results


class _ChunkedDistillation(torch.autograd.Function):
    """Gradients are made in forward, scaled in backward."""

    @staticmethod
    def forward(
        ctx: Any,
        weight: Tensor,
        teacher: Teacher,
        steps: Sequence[Step],
        results: Sequence[StepResult],
        divergence: Divergence,
        chunk_elements: int,
        *hiddens: Tensor,
    ) -> Tensor:
        dtype = torch.promote_types(weight.dtype, torch.float32)
        grad_weight = torch.zeros_like(weight, dtype=dtype)
        grad_hiddens = [torch.zeros_like(hidden) for hidden in hiddens]
        chunk = max(16, chunk_elements // weight.shape[0])
        positions = torch.unique(torch.cat([step.positions for step in steps]))  # ascending
        # Reused by every chunk: fresh pages of this size cost more than the arithmetic on them.
        spare = torch.empty((3, min(chunk, len(positions)), weight.shape[0]), dtype=dtype, device=weight.device)
        for window in positions.split(chunk):
            target = teacher.distribution(window, dtype)
            first_and_end = torch.stack([window[0], window[-1] + 1])
            for step, result, hidden, grad_hidden in zip(steps, results, hiddens, grad_hiddens, strict=True):
                low, high = torch.searchsorted(step.positions, first_and_end).tolist()
                if low == high:
                    continue
                at = target
                if high - low < len(window):  # not every position of the window is supervised in this step
                    index = torch.searchsorted(window, step.positions[low:high])
                    at = Distribution(*(field[index] for field in target))
                h = hidden[low:high]
                z, q, scratch = spare[:, : len(h)]  # [c, Vd] each
                if h.dtype == weight.dtype == dtype:
                    torch.mm(h, weight.T, out=z)
                else:
                    z.copy_(torch.nn.functional.linear(h, weight))
                _, log_normaliser, drafted = softmax(z, out=q)
                drafted = drafted if teacher.draft_ids is None else teacher.draft_ids[drafted]
                result.matched[low:high] = drafted == at.best
                torch.mul(at.p, at.mass[:, None], out=scratch)
                result.alpha_sum += torch.minimum(scratch, q, out=scratch).sum()

                values, grad_z = divergence(Draft(z, log_normaliser, q), at.p, at.p_log_p)
                result.loss_sum += values.sum()
                grad_z = grad_z.mul_(step.weight / len(step.positions)).to(h.dtype)
                torch.mm(grad_z, weight.to(h.dtype), out=grad_hidden[low:high])
                if h.dtype == dtype:
                    grad_weight.addmm_(grad_z.T, h)
                else:
                    grad_weight += grad_z.T @ h
        ctx.save_for_backward(grad_weight.to(weight.dtype), *grad_hiddens)
        means = (r.loss_sum * (s.weight / max(1, len(s.positions))) for s, r in zip(steps, results, strict=True))
        return torch.stack(list(means)).sum()

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        grad_weight, *grad_hiddens = ctx.saved_tensors
        return (grad_weight * grad_loss, *[None] * 5, *(grad * grad_loss for grad in grad_hiddens))


def reference_loss(weight: Tensor, teacher: Teacher, steps: Sequence[Step]) -> Tensor:
    """The forward-KL ``distillation_loss`` written plainly, every logit at once: what the chunked one must equal."""
    total = weight.new_zeros(())
    for step in steps:
        if len(step.positions) == 0:
            continue
        logits = teacher.logits(teacher.last[step.positions]).detach()
        logits = logits if teacher.draft_ids is None else logits[:, teacher.draft_ids]
        log_q = torch.nn.functional.linear(step.hidden, weight).log_softmax(-1)
        divergence = torch.nn.functional.kl_div(log_q, logits.log_softmax(-1), log_target=True, reduction="none")
        total = total + step.weight * divergence.sum(-1).mean()
    return total
