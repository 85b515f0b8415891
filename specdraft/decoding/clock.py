"""When the device reached a point of the work that was launched on it."""

import time

import torch


class Clock:
    """Marks points without waiting for the device, and tells the seconds between them once it has passed both: by
    events on a CUDA device, where launching takes another time than computing, and by the host's clock elsewhere."""

    def __init__(self, device: torch.device) -> None:
        self.on_cuda = device.type == "cuda"

    def mark(self) -> "float | torch.cuda.Event":
        """Here."""
        if not self.on_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, start: "float | torch.cuda.Event", end: "float | torch.cuda.Event") -> float:
        """Between two marks."""
        if isinstance(start, float) or isinstance(end, float):
            assert isinstance(start, float) and isinstance(end, float)
            return end - start
        end.synchronize()
        return start.elapsed_time(end) / 1e3
