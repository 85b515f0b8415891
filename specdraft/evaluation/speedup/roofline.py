"""How fast a decoding step could be on this machine: the roofline of its weights' bytes and of its arithmetic.

A step reads every weight once, whatever the number of tokens. Where it takes much longer than that, the machine waits
for operations to be launched, and a faster memory or a smaller dtype would not help."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from specdraft.decoding.clock import Clock
from specdraft.targets.parameters import target_sizes

if TYPE_CHECKING:
    from specdraft.targets import Target

_SECONDS = 0.2  # for each of the two probes
_SIDE = 1024  # of the square matrices whose product is timed


@dataclass(frozen=True)
class Roofline:
    """bytes, flops: of a step of one token, the cache left out. bandwidth, rate: bytes and FLOPs a second, measured by
    probes: a sum over as many bytes, and a product of two square matrices in the target's dtype."""

    bytes: float
    flops: float
    bandwidth: float
    rate: float

    @property
    def step_seconds(self) -> float:
        """The least that a step can take."""
        return max(self.bytes / self.bandwidth, self.flops / self.rate)


@torch.inference_mode()
def measure_roofline(target: "Target") -> Roofline | None:
    """Of the target on its device; None where its weights are in several places."""
    if target.engine is not None or target.server is not None or hasattr(target.model, "hf_device_map"):
        return None
    sizes = target_sizes(target.model, target.config)
    size = sizes.active * target.dtype.itemsize
    memory = torch.zeros(size // 4, device=target.device)
    square = torch.ones((_SIDE, _SIDE), dtype=target.dtype, device=target.device)
    reading = _fastest(memory.sum, target.device)
    multiplying = _fastest(lambda: square @ square, target.device)
    return Roofline(size, 2.0 * sizes.active, memory.nbytes / reading, 2.0 * _SIDE**3 / multiplying)


def _fastest(run: Callable[[], object], device: torch.device) -> float:
    """Seconds of the fastest of several calls."""
    clock, found = Clock(device), list[float]()
    run()
    end = time.perf_counter() + _SECONDS
    while not found or time.perf_counter() < end:
        before = clock.mark()
        run()
        found.append(clock.seconds(before, clock.mark()))
    return min(found)
