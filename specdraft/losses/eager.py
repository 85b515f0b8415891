"""A chunk's divergence, acceptance, best tokens and gradient by torch's operations, one by one: the reference of the
other ways, and what every device has.

c = positions of a chunk, V / Vd = target / draft vocabulary."""

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from specdraft.losses.divergence import Compared, Distribution, Divergence, Draft

# Elements of draft logits that torch's operations pass over at a time, for each of a processor's threads: with what is
# made of them they stay in its caches. Fewer cost more calls, each of which wakes the threads, than that gains.
CACHED = 16 * 32_768
_BLOCK = 128  # logits among which the largest is looked for
M = TypeVar("M", bound=Callable[..., Any])


def in_full_precision(method: M) -> M:
    """A method of a ``Comparison`` without autocast, which would have the sums of a row in bf16."""

    @functools.wraps(method)
    def exactly(self: Any, logits: Tensor, *rest: Any, **named: Any) -> Any:
        with torch.autocast(logits.device.type, enabled=False):
            return method(self, logits, *rest, **named)

    return cast("M", exactly)


class Eager:
    """By torch's own operations, in ``dtype``; on a processor a few rows at a time."""

    def __init__(self, divergence: Divergence, size: int, vocabulary: int, dtype: torch.dtype, device: torch.device):
        """Of chunks of at most ``size`` positions and ``vocabulary`` tokens."""
        self.divergence = divergence
        cached = CACHED * torch.get_num_threads() // vocabulary
        self.rows = max(1, min(size, cached) if device.type == "cpu" else size)
        self.spare = torch.empty((3, self.rows, vocabulary), dtype=dtype, device=device)

    @in_full_precision
    def target(self, logits: Tensor, draft_ids: Tensor | None, label: Tensor | None) -> Distribution:
        """See ``Comparison``."""
        p = logits
        if draft_ids is not None or logits.dtype != self.spare.dtype:
            p = self.spare.new_empty((len(logits), self.spare.shape[-1]))
        blocks = []
        for given, out in zip(logits.split(self.rows), p.split(self.rows), strict=True):
            q, chosen, _ = self.spare[:, : len(given)]
            _, *rows = distribution(finite(given.to(q.dtype)), draft_ids, q, chosen)
            blocks.append(rows)
            out.copy_(q)
        p_log_p, mass, best = map(torch.cat, zip(*blocks, strict=True))
        return Distribution(p, p_log_p, mass, best, label)

    @in_full_precision
    def draft(self, z: Tensor, target: Distribution, index: Tensor | None, keep: bool) -> Compared:
        """See ``Comparison``."""
        grad = torch.empty_like(z) if keep else z
        blocks = []
        for start in range(0, len(z), self.rows):
            rows = slice(start, min(start + self.rows, len(z)))
            blocks.append(self._block(z[rows], target.at(rows if index is None else index[rows]), grad[rows]))
        values, alpha, drafted = map(torch.cat, zip(*blocks, strict=True))
        return Compared(values, alpha, drafted, grad)

    def _block(self, z: Tensor, target: Distribution, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Values, alpha and best tokens of a block whose gradient is written into ``grad``."""
        q, overlap, wide = self.spare[:, : len(z)]  # [c, Vd] each
        if z.data_ptr() != grad.data_ptr() or z.dtype != q.dtype:
            z = finite(wide.copy_(z))
        values, alpha, drafted, grad_z = compared(self.divergence, z, target, q, overlap)
        if grad_z.data_ptr() != grad.data_ptr():
            grad.copy_(grad_z)
        return values, alpha, drafted


def finite(logits: Tensor) -> Tensor:
    """A token that a model's own head forbids has -inf, which times a probability of zero would be nan."""
    return logits.clamp_(min=torch.finfo(logits.dtype).min)


def distribution(
    logits: Tensor, draft_ids: Tensor | None, out: Tensor | None = None, chosen: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """p, sum p log p, mass and best of finite ``logits [c, V]``, as in ``Distribution``; p is made in ``out``, the
    logits of the draft vocabulary in ``chosen``."""
    if draft_ids is None:
        p, log_normalizer, best = softmax(logits, out)
        mass = torch.ones_like(log_normalizer)
    else:
        (_, best), outside = _max(logits), logits.logsumexp(-1)
        logits = torch.index_select(logits, -1, draft_ids, out=chosen)  # [c, Vd]
        p, log_normalizer, _ = softmax(logits, out)
        mass = (log_normalizer - outside).exp_()
    return p, torch.linalg.vecdot(p, logits) - log_normalizer, mass, best


def compared(
    divergence: Divergence, z: Tensor, target: Distribution, q: Tensor | None = None, overlap: Tensor | None = None
) -> Compared:
    """Of finite logits ``z [c, Vd]``, which are overwritten, at the target's positions. What the fields ``q`` and
    ``overlap`` of ``Draft`` are made in is given, or new."""
    q, log_normalizer, drafted = softmax(z, q)
    overlap = torch.mul(target.p, target.mass[:, None], out=overlap)
    alpha = torch.minimum(overlap, q, out=overlap).sum(-1)
    values, grad = divergence(Draft(z, log_normalizer, q, overlap, alpha), target)
    return Compared(values, alpha, drafted, grad)


def softmax(logits: Tensor, out: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Softmax of ``logits [c, Vd]``, in ``out`` if there is one, the log normalizer ``[c]`` and the argmax ``[c]``.
    torch's own functions for the last two take longer than the softmax."""
    if torch.compiler.is_compiling():
        return _in_few_passes(logits)
    largest, index = _max(logits)
    q = torch.softmax(logits, -1, out=out)  # of the largest logit exp(0), over the sum
    return q, largest - q.gather(-1, index[:, None]).squeeze(-1).log(), index


def _in_few_passes(logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The same of what a compiler makes one pass of that is in the same loop, which no read at an index is."""
    largest = logits.amax(-1, keepdim=True)  # [c, 1]
    shares = (logits - largest).exp()
    total = shares.sum(-1, keepdim=True)  # [c, 1]
    size = logits.shape[-1]
    places = torch.arange(size, dtype=torch.int32, device=logits.device)
    index = torch.where(logits == largest, places, size - 1).amin(-1).long()  # of nan the last
    return shares / total, (largest + total.log()).squeeze(-1), index


def _max(rows: Tensor) -> tuple[Tensor, Tensor]:
    """The largest of each of the rows ``[c, V]`` and the first place where it stands, as ``rows.max(-1)``, whose search
    for places takes a processor ten times as long as the search for values: values of blocks first, then a place in
    one block."""
    size = rows.shape[-1]
    whole = size // _BLOCK * _BLOCK
    if not whole:
        return rows.max(-1)
    best = rows[:, :whole].unflatten(-1, (-1, _BLOCK)).amax(-1)
    if whole < size:
        best = torch.cat([best, rows[:, whole:].amax(-1, keepdim=True)], -1)
    block = best.argmax(-1, keepdim=True)  # [c, 1]
    places = (block * _BLOCK + torch.arange(_BLOCK, device=rows.device)).clamp_(max=size - 1)  # [c, block]
    values, inside = rows.gather(-1, places).max(-1)
    return values, (block.squeeze(-1) * _BLOCK + inside).clamp_(max=size - 1)
