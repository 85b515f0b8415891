"""How the loss walks over the positions of a flat batch: windows of supervised ones, large where memory allows.

R = positions of the flat batch, P = those that any step supervises, n = those of one step, K = windows."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

# Positions of a window on a GPU: each window reads and writes the projection's gradient, 8 bytes of an element, for
# which its products have 2 * 2,048 FLOPs to do: enough for any GPU to be busy with arithmetic.
POSITIONS = 2048
# Elements of a window's draft logits on a processor. Larger ones take memory and fall out of its caches; smaller ones
# make the traffic of the projection's gradient dominate. See benchmarks/train_step.py. In fp32 they are a little less
# than the blocks that are used again when they are freed (``allocation.py``).
ELEMENTS = 255 * 32_768
SHARE = 16  # of a GPU's free memory fp32 draft logits take one part; the target's vocabulary may be the larger one


def window_size(vocabulary: int, device: torch.device) -> int:
    """Positions of a window whose draft logits have ``vocabulary`` columns."""
    if device.type != "cuda":
        return fitting(vocabulary, None)
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return fitting(vocabulary, torch.cuda.mem_get_info(device)[0] + unused)


def fitting(vocabulary: int, free: float | None) -> int:
    """The same on a GPU of which so many bytes are ``free``, or (None) on a processor: a multiple of 16, as products of
    an odd number of rows take up to half as long again."""
    count = ELEMENTS // vocabulary if free is None else min(POSITIONS, int(free / SHARE / 4 / vocabulary))
    return max(16, count - count % 16)


class Part(NamedTuple):
    """What a step supervises in a window: its positions from ``low`` to ``high``, which are those at ``places [high -
    low]`` of the window, or None where they are all of them."""

    low: int
    high: int
    places: Tensor | None


class Windows:
    """The ascending ``positions [P]`` of all steps in windows of ``size``, and ``ranks``: where each step's own
    positions are among them, ``[n]`` each. Bounds of all steps and windows reach the host in one copy."""

    def __init__(self, steps: Sequence[Tensor], total: int, size: int) -> None:
        """Of the ascending positions ``[n]`` of each step in a batch of ``total``."""
        flat = torch.cat(list(steps))
        rank = flat.new_zeros(total).index_fill_(0, flat, 1).cumsum_(0).sub_(1)  # [R], of what any step supervises
        ranks = rank[flat]
        self.size = size
        self.ranks = ranks.split([len(step) for step in steps])
        count = -(-total // size)
        edges = torch.arange(count + 1, device=flat.device) * size
        bounds = torch.stack([torch.searchsorted(own, edges) for own in self.ranks])  # [S, K + 1]
        last, *self._bounds = torch.cat([rank[-1:], bounds.flatten()]).tolist()
        self._columns = count + 1
        self.positions = torch.empty_like(flat).scatter_(0, ranks, flat)[: last + 1]

    def __iter__(self) -> Iterator[tuple[Tensor, list[Part | None]]]:
        """Positions ``[c]`` of each window and what every step has there, or None."""
        for number, window in enumerate(self.positions.split(self.size) if len(self.positions) else ()):
            yield window, [self._part(number, len(window), step) for step in range(len(self.ranks))]

    def _part(self, number: int, length: int, step: int) -> Part | None:
        at = step * self._columns + number
        low, high = self._bounds[at], self._bounds[at + 1]
        if low == high:
            return None
        places = None if high - low == length else self.ranks[step][low:high] - number * self.size
        return Part(low, high, places)
