"""What is logged: sums and totals, added over batches, summed over ranks, divided once; and what the machine does.

A mean of means is wrong as soon as batches or ranks hold different numbers of supervised positions."""

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import psutil
import torch
from lightning.fabric.utilities.throughput import get_available_flops
from torch import Tensor

from specdraft.drafters.base import Drafter
from specdraft.targets import Target
from specdraft.targets.parameters import target_sizes
from specdraft.training.planning.costs import target_forward_flops

_GIB = 2.0**30
_STEP = re.compile(r"step_(\d+)/(\w+)_sum")


class Counts:
    """Accumulates named scalars whose names end in ``_sum`` or ``_total``."""

    def __init__(self) -> None:
        self._values: dict[str, Tensor] = {}

    def add(self, values: Mapping[str, Tensor]) -> None:
        """Add one batch's sums and totals, on whatever device they are; nothing is synchronized here."""
        for name, value in values.items():
            self._values[name] = self._values.get(name, 0.0) + value.detach().double()

    def take(self, gather: Callable[[dict[str, float]], list[dict[str, float]]]) -> dict[str, float]:
        """What was added since the last call, summed over the ranks that ``gather`` asks. Every rank must call it. They
        may know different names: a batch whose documents are all short has no positions in the later steps."""
        names = sorted(self._values)
        ours = torch.stack([self._values[name].reshape(()) for name in names]).tolist() if names else []
        self._values = {}
        total: Counter[str] = Counter()
        for values in gather(dict(zip(names, ours, strict=True))):
            total.update(values)
        return dict(total)


def gradient_norm(gradients: Sequence[Tensor]) -> float:
    """Of all gradients together. On a processor their squares are summed in fp64: torch adds millions of them in fp32
    one after the other, and was 2e-4 too low for a head of 10 million parameters."""
    kinds = {"cpu": torch.float64}
    norms = [torch.linalg.vector_norm(each, dtype=kinds.get(each.device.type, torch.float32)) for each in gradients]
    return torch.stack(norms).norm().item()


def ratios(counts: Mapping[str, float]) -> dict[str, float]:
    """Sums divided by their totals, under the names that dashboards show.
    ``NAME_sum / NAME_total`` is ``NAME``. A drafter's ``step_{s}/NAME_sum`` over ``step_{s}/total`` is ``NAME_{s}``,
    the loss being ``loss_step_{s}``. From its ``match`` (the share of positions whose drafted prefix equals the
    target's own choices through step s) comes ``teacher_forced_acceptance_length`` = 1 + the sum over s."""
    values: dict[str, float] = {}
    survival = []
    for name, value in counts.items():
        if not name.endswith("_sum"):
            continue
        step = _STEP.fullmatch(name)
        total = counts[f"step_{step[1]}/total" if step else f"{name.removesuffix('_sum')}_total"]
        if total and step is None:
            values[name.removesuffix("_sum")] = value / total
        elif total and step is not None:
            values[f"loss_step_{step[1]}" if step[2] == "loss" else f"{step[2]}_{step[1]}"] = value / total
            survival += [value / total] if step[2] == "match" else []
    if survival:
        values["teacher_forced_acceptance_length"] = 1.0 + sum(survival)
    return values


def flops_per_token(target: Target, drafter: Drafter, sequence_length: int, stored: bool) -> float:
    """FLOPs of a training step per token, as ``plan=true`` counts: every position is supervised, and with ``stored``
    hidden states the target reads nothing. To be asked before a strategy cuts parameters into pieces."""
    reading = 0.0 if stored else target_forward_flops(target_sizes(target.model, target.config), sequence_length)
    return reading + sum(drafter.training_flops(sequence_length))


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
