"""A chunk's divergence, acceptance, best tokens and gradient by one Triton kernel, which writes the gradient over the
logits: ``eager.py`` without its twenty passes over memory.

c = positions of a chunk, V / Vd = target / draft vocabulary. One program has one position and passes three times over
its row, which after the first is in the GPU's second-level cache: normalizer and best token, sums, gradient. Formulas
are those of ``divergence.py``. The target is kept as its logits in the dtype they came in, for p = exp(logit - log
normalizer) is cheaper than reading it in fp32."""

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdraft.losses.divergence import Compared, Divergence, kind, wants_labels

BLOCK, WARPS = 2048, 8  # tokens that a program reads at a time, 16 bytes of bf16 a thread
_LOWEST = tl.constexpr(-1e38)  # stands for -inf, which times a probability of zero would be nan
_TINY = tl.constexpr(torch.finfo(torch.float32).tiny)  # the least probability that has a log, as in ``divergence._log``
_LOG_TINY = tl.constexpr(math.log(torch.finfo(torch.float32).tiny))


class Logits(NamedTuple):
    """The target at c positions: its logits ``[c, Vd]``, their log normalizer ``[c]``, sum p log p ``[c]`` of the
    renormalized p, and mass, best and label as in ``Distribution``."""

    logits: Tensor
    log_normalizer: Tensor
    p_log_p: Tensor
    mass: Tensor
    best: Tensor
    label: Tensor


class Fused:
    """A ``Comparison`` on a GPU in fp32, of logits in any dtype up to that."""

    def __init__(self, divergence: Divergence) -> None:
        """Of a divergence that has a ``kind``."""
        found = kind(divergence)
        assert found is not None
        self.divergence, (self.kind, self.option) = divergence, found

    def target(self, logits: Tensor, draft_ids: Tensor | None, label: Tensor | None) -> Logits:
        """See ``Comparison``."""
        if self.kind in ("cross_entropy", "ce_l1"):
            wants_labels(label)
        log_normalizer, p_log_p, best = _statistics(logits)
        mass, label = torch.ones_like(log_normalizer), best if label is None else label
        if draft_ids is not None:
            outside, logits = log_normalizer, logits.index_select(-1, draft_ids)  # [c, Vd]
            log_normalizer, p_log_p, _ = _statistics(logits)
            mass = (log_normalizer - outside).exp_()
        return Logits(logits, log_normalizer, p_log_p, mass, best, label)

    def draft(self, z: Tensor, target: Logits, index: Tensor | None, keep: bool) -> Compared:
        """See ``Comparison``."""
        z = z.contiguous()
        count, size = z.shape
        values, alpha = z.new_empty((2, count), dtype=torch.float32)
        drafted = torch.empty(count, dtype=torch.long, device=z.device)
        grad = torch.empty_like(z) if keep else z
        logits, *rows, _, label = target
        index = drafted if index is None else index  # any pointer: it is not read
        with torch.cuda.device_of(z):
            _compare[(count,)](
                *(z, grad, logits, *rows, label, index, values, alpha, drafted, size, self.option),
                kind=self.kind, indexed=index is not drafted, block=BLOCK, num_warps=WARPS,
            )  # fmt: skip
        return Compared(values, alpha, drafted, grad)


def _statistics(logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Log normalizer ``[c]``, sum p log p ``[c]`` and best token ``[c]`` of ``logits [c, V]``."""
    logits = logits.contiguous()
    count, size = logits.shape
    log_normalizer, p_log_p = logits.new_empty((2, count), dtype=torch.float32)
    best = torch.empty(count, dtype=torch.long, device=logits.device)
    with torch.cuda.device_of(logits):
        _describe[(count,)](logits, log_normalizer, p_log_p, best, size, block=BLOCK, num_warps=WARPS)
    return log_normalizer, p_log_p, best


@triton.jit
def _softmax(row, size, block: tl.constexpr):
    """Log normalizer, sum p log p and the first of the largest of a row. Each lane keeps sums of its own until the end:
    the row is read once, and lanes meet once. nan is neither lower nor larger than anything and stays in the sums."""
    lane = tl.arange(0, block)
    largest = tl.full([block], -1e38, tl.float32)
    total = tl.zeros([block], tl.float32)
    weighted = tl.zeros([block], tl.float32)
    index = tl.zeros([block], tl.int32)
    for start in range(0, size, block):
        at = start + lane
        x = tl.load(row + at, mask=at < size, other=-float("inf")).to(tl.float32)
        there = ~(x <= _LOWEST)
        larger = x > largest
        new = tl.where(larger, x, largest)
        shrunk = tl.exp(largest - new)
        share = tl.where(there, tl.exp(x - new), 0.0)
        total = total * shrunk + share
        weighted = weighted * shrunk + tl.where(there, x, 0.0) * share
        index = tl.where(larger, at, index)
        largest = new
    top = tl.max(largest, 0)
    shrunk = tl.exp(largest - top)
    total = tl.sum(total * shrunk, 0)
    log_normalizer = top + tl.log(total)
    p_log_p = tl.sum(weighted * shrunk, 0) / total - log_normalizer
    return log_normalizer, p_log_p, tl.min(tl.where(largest == top, index, size), 0)


@triton.jit
def _describe(logits, log_normalizer, p_log_p, best, size, block: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    normalizer, entropy, index = _softmax(logits + row * size, size, block)
    tl.store(log_normalizer + row, normalizer)
    tl.store(p_log_p + row, entropy)
    tl.store(best + row, index)


@triton.jit
def _tokens(z, logits, at, size, normalizer, target_normalizer):
    """At a block of tokens: whether they are there, log q, q, log p and p."""
    there = at < size
    x = tl.load(z + at, mask=there, other=-float("inf")).to(tl.float32)
    t = tl.load(logits + at, mask=there, other=-float("inf")).to(tl.float32)
    log_q = tl.where(x <= _LOWEST, _LOWEST, x - normalizer)
    log_p = tl.where(t <= _LOWEST, _LOWEST, t - target_normalizer)
    return there, log_q, tl.exp(log_q), log_p, tl.exp(log_p)


@triton.jit
def _compare(
    z, grad, logits, log_normalizer, p_log_p, mass, label, index, values, alpha, drafted, size, option,
    kind: tl.constexpr, indexed: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    source = tl.load(index + row) if indexed else row
    z, grad, logits = z + row * size, grad + row * size, logits + source * size
    normalizer, _, best = _softmax(z, size, block)
    tl.store(drafted + row, best)
    target_normalizer = tl.load(log_normalizer + source)
    inside, entropy, known = tl.load(mass + source), tl.load(p_log_p + source), tl.load(label + source)

    lane = tl.arange(0, block)
    overlaps = tl.zeros([block], tl.float32)  # of alpha
    smaller = tl.zeros([block], tl.float32)  # of q where alpha follows it
    forward = tl.zeros([block], tl.float32)  # of p times the log of what it is compared with
    reverse = tl.zeros([block], tl.float32)  # of q times its log ratio
    for start in range(0, size, block):
        at = start + lane
        there, log_q, q, log_p, p = _tokens(z, logits, at, size, normalizer, target_normalizer)
        overlaps += tl.minimum(inside * p, q, propagate_nan=tl.PropagateNan.ALL)
        if kind == "total_variation" or kind == "lk_hybrid" or kind == "ce_l1":
            smaller += tl.where(q <= inside * p, q, 0.0)
        if kind == "forward_kl" or kind == "lk_hybrid":
            forward += p * log_q
        elif kind == "reverse_kl":
            reverse += q * (log_q - tl.maximum(log_p, _LOG_TINY))
        elif kind == "jsd":
            log_m = tl.log(tl.maximum(q + option * (p - q), _TINY))
            forward += p * log_m
            reverse += q * (log_q - log_m)
        elif kind == "cross_entropy" or kind == "ce_l1":
            forward += tl.where(there & (at == known), log_q, 0.0)
    accepted, below = tl.sum(overlaps, 0), tl.sum(smaller, 0)
    ahead, back = tl.sum(forward, 0), tl.sum(reverse, 0)
    share = tl.exp(-option * accepted)  # lambda of the hybrid
    if kind == "forward_kl":
        value = entropy - ahead
    elif kind == "reverse_kl":
        value = back
    elif kind == "jsd":
        value = option * (entropy - ahead) + (1 - option) * back
    elif kind == "total_variation":
        value = 1 - accepted
    elif kind == "lk_hybrid":
        value = (1 - share) * (1 - accepted) + share * (entropy - ahead)
    elif kind == "ce_l1":
        value = 2 * (1 - option) * (1 - accepted) - option * ahead
    else:
        value = -ahead
    tl.store(values + row, value)
    tl.store(alpha + row, accepted)

    for start in range(0, size, block):
        at = start + lane
        there, log_q, q, log_p, p = _tokens(z, logits, at, size, normalizer, target_normalizer)
        slope = below - tl.where(q <= inside * p, 1.0, 0.0)
        if kind == "forward_kl":
            gradient = q - p
        elif kind == "reverse_kl":
            gradient = q * (log_q - tl.maximum(log_p, _LOG_TINY) - back)
        elif kind == "jsd":
            log_m = tl.log(tl.maximum(q + option * (p - q), _TINY))
            gradient = (1 - option) * q * (log_q - log_m - back)
        elif kind == "total_variation":
            gradient = q * slope
        elif kind == "lk_hybrid":
            gradient = share * (q - p) + (1 - share) * q * slope
        else:
            gradient = tl.where(known >= 0, q - tl.where(at == known, 1.0, 0.0), 0.0)
            if kind == "ce_l1":
                gradient = option * gradient + 2 * (1 - option) * q * slope
        tl.store(grad + at, gradient.to(grad.dtype.element_ty), mask=there)
