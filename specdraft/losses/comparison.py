"""What a chunk of draft logits costs beside the target's distribution, with its gradient: by torch, or by one kernel.

c = positions of a chunk, V / Vd = target / draft vocabulary. ``Eager`` is the reference and what every device has;
``fused.py`` does the same on a GPU without a pass of its own for each operation."""

import importlib.util
from typing import Any, Protocol

import torch
from torch import Tensor

from specdraft.errors import warn
from specdraft.losses.divergence import Compared, Distribution, Divergence, Draft
from specdraft.text import reason

# Elements of draft logits that torch's operations pass over at a time, for each of a processor's threads: with what is
# made of them they stay in its caches. Fewer cost more calls, each of which wakes the threads, than that gains.
CACHED = 16 * 32_768
_BLOCK = 128  # logits among which the largest is looked for


class Comparison(Protocol):
    """A way to compare the chunks of one loss."""

    def target(self, logits: Tensor, draft_ids: Tensor | None, label: Tensor | None) -> Any:
        """The target at a window's positions, of its logits ``[c, V]``, which may be overwritten; with its ``best`` and
        ``mass`` as in ``Distribution``."""

    def draft(self, z: Tensor, target: Any, index: Tensor | None, keep: bool) -> Compared:
        """The draft's logits ``z [c, Vd]`` beside the target at the positions ``index [c]``, None for all of them. The
        gradient takes z's place unless z is to be kept."""


class Eager:
    """By torch's own operations, in ``dtype``; on a processor a few rows at a time."""

    def __init__(self, divergence: Divergence, size: int, vocabulary: int, dtype: torch.dtype, device: torch.device):
        """Of chunks of at most ``size`` positions and ``vocabulary`` tokens."""
        self.divergence = divergence
        cached = CACHED * torch.get_num_threads() // vocabulary
        self.rows = max(1, min(size, cached) if device.type == "cpu" else size)
        self.spare = torch.empty((3, self.rows, vocabulary), dtype=dtype, device=device)

    def target(self, logits: Tensor, draft_ids: Tensor | None, label: Tensor | None) -> Distribution:
        """See ``Comparison``."""
        p = logits
        if draft_ids is not None or logits.dtype != self.spare.dtype:
            p = self.spare.new_empty((len(logits), self.spare.shape[-1]))
        blocks = []
        for given, out in zip(logits.split(self.rows), p.split(self.rows), strict=True):
            q, chosen, _ = self.spare[:, : len(given)]
            block = self._finite(given.to(q.dtype))
            if draft_ids is None:
                _, log_normalizer, best = softmax(block, out=q)
                mass = torch.ones_like(log_normalizer)
            else:
                best, outside = block.argmax(-1), block.logsumexp(-1)
                block = torch.index_select(block, -1, draft_ids, out=chosen)  # [c, Vd]
                _, log_normalizer, _ = softmax(block, out=q)
                mass = (log_normalizer - outside).exp_()
            blocks.append((torch.linalg.vecdot(q, block) - log_normalizer, mass, best))
            out.copy_(q)
        p_log_p, mass, best = map(torch.cat, zip(*blocks, strict=True))
        return Distribution(p, p_log_p, mass, best, label)

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
            z = self._finite(wide.copy_(z))
        _, log_normalizer, drafted = softmax(z, out=q)
        torch.mul(target.p, target.mass[:, None], out=overlap)
        alpha = torch.minimum(overlap, q, out=overlap).sum(-1)
        values, grad_z = self.divergence(Draft(z, log_normalizer, q, overlap, alpha), target)
        if grad_z.data_ptr() != grad.data_ptr():
            grad.copy_(grad_z)
        return values, alpha, drafted

    def _finite(self, logits: Tensor) -> Tensor:
        """A token that a model's own head forbids has -inf, which times a probability of zero would be nan."""
        return logits.clamp_(min=torch.finfo(self.spare.dtype).min)


def softmax(logits: Tensor, out: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Softmax of ``logits [c, Vd]`` into ``out``, the log normalizer ``[c]`` and the argmax ``[c]``. torch's own
    functions for the last two take longer than the softmax."""
    largest, index = _max(logits)
    torch.softmax(logits, -1, out=out)  # of the largest logit exp(0), over the sum
    return out, largest - out.gather(-1, index[:, None]).squeeze(-1).log(), index


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


def comparison(
    divergence: Divergence, size: int, vocabulary: int, dtype: torch.dtype, device: torch.device
) -> Comparison:
    """The kernel on a GPU that Triton compiles for and for a divergence that it knows, else torch."""
    if device.type == "cuda" and dtype == torch.float32 and importlib.util.find_spec("triton"):
        from specdraft.losses.fused import Fused, kind

        if kind(divergence) and agrees(Fused(divergence), divergence, device):
            return Fused(divergence)
    return Eager(divergence, size, vocabulary, dtype, device)


_agreeing: dict[tuple[Divergence, torch.device], bool] = {}


def agrees(other: Comparison, divergence: Divergence, device: torch.device) -> bool:
    """Whether a kernel gives what torch gives, asked once a divergence and device. Else, with one warning, it is not
    used."""
    if (divergence, device) not in _agreeing:
        try:
            amiss = _difference(other, Eager(divergence, 4, 150, torch.float32, device), device)
        except Exception as error:  # of a compiler, of a driver
            amiss = reason(error)
        if amiss:
            warn(f"the kernel of the loss is not used, training is slower: {amiss}")
        _agreeing[divergence, device] = not amiss
    return _agreeing[divergence, device]


def _difference(one: Comparison, other: Comparison, device: torch.device) -> str:
    own = torch.Generator(device).manual_seed(0)
    logits, z = (3 * torch.randn((7, size), generator=own, device=device) for size in (300, 150))
    draft_ids, label = torch.arange(0, 300, 2, device=device), torch.arange(7, device=device)
    index = torch.tensor([0, 2, 3, 6], device=device)
    targets = (each.target(logits.clone(), draft_ids, label) for each in (one, other))
    pairs = zip((one, other), targets, strict=True)
    found = (each.draft(z[index].clone(), target, index, keep=False) for each, target in pairs)
    worst = max((a.double() - b.double()).abs().max().item() for a, b in zip(*found, strict=True))
    return "" if worst < 1e-3 else f"it differs by {worst:.2g}"
