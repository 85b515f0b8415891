"""When the device reached a point of the work that was launched on it. Clocks stand still while passes are compiled."""

import time
from typing import NamedTuple

import torch

from specdraft.decoding.compilation import seconds_spent


def now() -> float:
    """The host's seconds, without those that went into compiling."""
    return time.perf_counter() - seconds_spent()


class Mark(NamedTuple):
    """A point: when the host came by, and, on a CUDA device, the event and the seconds of compiling before it."""

    host: float
    event: "torch.cuda.Event | None" = None
    compiling: float = 0.0


class Clock:
    """Marks points without waiting for the device, and tells the seconds between them once it has passed both: by
    events on a CUDA device, where launching takes another time than computing, and by the host's clock elsewhere."""

    def __init__(self, device: torch.device) -> None:
        self.on_cuda = device.type == "cuda"

    def mark(self) -> Mark:
        """Here."""
        if not self.on_cuda:
            return Mark(now())
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return Mark(now(), event, seconds_spent())

    def seconds(self, start: Mark, end: Mark) -> float:
        """Between two marks."""
        if start.event is None or end.event is None:
            return end.host - start.host
        end.event.synchronize()
        # The device waits while the host compiles.
        return start.event.elapsed_time(end.event) / 1e3 - (end.compiling - start.compiling)
