"""What the machine does while training: arithmetic done of the arithmetic possible, and memory."""

import psutil
import torch
from lightning.fabric.utilities.throughput import get_available_flops

from specdraft.drafters.base import Drafter
from specdraft.targets import Target
from specdraft.training.planning import costs

_GIB = 2.0**30


def flops_per_token(target: Target, drafter: Drafter, row_length: int, stored: bool) -> float:
    """FLOPs of a training step per token, by the formulas of ``plan=true``: every position counts as supervised.

    With ``stored`` hidden states the target reads nothing. Counted before a strategy cuts parameters into pieces.
    """
    reading = 0.0 if stored else costs.target_forward_flops(costs.target_sizes(target.model, target.config), row_length)
    return reading + sum(drafter.training_flops(row_length))


def peak_flops(device: torch.device, precision: str) -> float | None:
    """Dense peak of ``device`` in FLOP/s for a ``trainer.precision``; None where nobody knows it, as on any CPU."""
    dtype = torch.bfloat16 if "bf16" in precision else torch.float16 if "16" in precision else torch.float32
    flops = get_available_flops(device, dtype)
    return None if flops is None else float(flops)


def memory(device: torch.device) -> dict[str, float]:
    """GiB: what this process holds now, and the most that was allocated on its GPU since the last call."""
    values = {"memory_resident_gib": psutil.Process().memory_info().rss / _GIB}
    if device.type == "cuda":
        values["memory_gpu_peak_gib"] = torch.cuda.max_memory_allocated(device) / _GIB
        torch.cuda.reset_peak_memory_stats(device)
    return values
