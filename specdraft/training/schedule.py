"""The optimizer and the learning rate: linear warm-up, then a cosine down to a fraction of the peak."""

import math
from dataclasses import dataclass

import torch
from torch import nn

from specdraft.errors import UserError


@dataclass(frozen=True)
class OptimizerSettings:
    """The optimizer and its schedule. ``warmup_steps`` below 1 is a fraction of all steps.

    ``name``: adamw, or sgd, whose momentum is ``beta1``. ``final_ratio`` is the last learning rate divided by
    ``learning_rate``, the peak.
    """

    learning_rate: float = 1e-4
    warmup_steps: float = 0.02
    final_ratio: float = 0.1
    weight_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.95
    name: str = "adamw"

    def __post_init__(self) -> None:
        if not self.learning_rate > 0:
            raise UserError(f"model.optimizer.learning_rate is {self.learning_rate}: expected a positive number")
        if self.name not in ("adamw", "sgd"):
            raise UserError(f"model.optimizer.name is {self.name!r}: expected adamw or sgd")

    def ratio(self, step: int, max_steps: int) -> float:
        """Learning rate of update ``step`` (from 0) as a fraction of the peak."""
        warmup = self.warmup_steps * max_steps if self.warmup_steps < 1 else self.warmup_steps
        if step + 1 < warmup:
            return (step + 1) / warmup
        progress = min(1.0, (step + 1 - warmup) / max(1.0, max_steps - warmup))
        return self.final_ratio + (1 - self.final_ratio) * 0.5 * (1 + math.cos(math.pi * progress))

    def build(self, module: nn.Module, offloaded: bool = False) -> torch.optim.Optimizer:
        """The optimizer over the trainable parameters; norms (vectors) are not decayed.

        ``offloaded``: its states stay in the memory of the host, for which DeepSpeed has an AdamW of its own. Raises
        UserError where it has none.
        """
        trainable = [parameter for parameter in module.parameters() if parameter.requires_grad]
        matrices = [parameter for parameter in trainable if parameter.ndim >= 2]
        vectors = [parameter for parameter in trainable if parameter.ndim < 2]
        groups = [
            {"params": matrices, "weight_decay": self.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ]
        groups = [group for group in groups if group["params"]]
        betas = (self.beta1, self.beta2)
        if self.name == "sgd":
            if offloaded:
                raise UserError("model.optimizer.name is sgd: expected adamw with strategy.offload_optimizer=true")
            return torch.optim.SGD(groups, lr=self.learning_rate, momentum=self.beta1)
        if offloaded:
            from deepspeed.ops.adam import DeepSpeedCPUAdam  # compiles itself at its first use

            return DeepSpeedCPUAdam(groups, lr=self.learning_rate, betas=betas, adamw_mode=True)
        return torch.optim.AdamW(groups, lr=self.learning_rate, betas=betas)
