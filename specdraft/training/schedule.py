"""The optimizer and the learning rate: linear warm-up, then one of four courses to a fraction of the peak."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from specdraft.errors import UserError
from specdraft.training.compilation import compile_operator
from specdraft.training.muon import MuonAdamW
from specdraft.training.parameter_groups import check_factors, parameter_groups

SCHEDULES = ("cosine", "wsd", "linear", "constant")
SHAPES = ("sqrt", "linear")
NAMES = ("adamw", "muon", "auto", "sgd")
NO_MUON = (
    "model.optimizer.name is muon, which updates whole matrices, and DeepSpeed cuts them into flat pieces: expected "
    "strategy=single or strategy=ddp, or model.optimizer.name=adamw"
)


@dataclass(frozen=True)
class OptimizerSettings:
    """The optimizer and its schedule. ``warmup_steps`` and ``decay_steps`` below 1 are fractions of all steps.

    ``name``: adamw; muon, for matrices whose names contain none of ``muon_excludes``, with ``muon_learning_rate`` and
    ``muon_momentum``, and AdamW for the rest; auto, which is muon, or adamw under DeepSpeed; or sgd, whose momentum is
    ``beta1``. ``learning_rate_factors``: of the learning rate of parameters whose names contain a key. ``final_ratio``
    is the last learning rate divided by ``learning_rate``, the peak. ``schedule``: cosine and linear decay from the end
    of the warm-up, wsd (warm-up, stable, decay: MiniCPM, section 4) over the last ``decay_steps`` alone, by
    1 - sqrt(progress), which Haegele et al. 2024 found best, or linearly. ``fused``: AdamW's update in one kernel,
    where torch has it."""

    learning_rate: float = 1e-4
    warmup_steps: float = 0.02
    final_ratio: float = 0.1
    weight_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.95
    name: str = "adamw"
    schedule: str = "cosine"
    decay_steps: float = 0.2
    decay_shape: str = "sqrt"
    fused: bool = True
    learning_rate_factors: Mapping[str, float] = field(default_factory=dict)
    muon_learning_rate: float = 1e-3
    muon_momentum: float = 0.95
    muon_excludes: Sequence[str] = ("lm_head", "embed")

    def __post_init__(self) -> None:
        positive = {name: getattr(self, name) for name in ("learning_rate", "decay_steps", "muon_learning_rate")}
        factors = {f"learning_rate_factors.{name}": value for name, value in self.learning_rate_factors.items()}
        for name, value in (positive | factors).items():
            if not (isinstance(value, int | float) and value > 0):
                raise UserError(f"model.optimizer.{name} is {value}: expected a positive number")
        for name in ("warmup_steps", "final_ratio", "weight_decay", "beta1", "beta2", "muon_momentum"):
            if not (isinstance(value := getattr(self, name), int | float) and value >= 0):
                raise UserError(f"model.optimizer.{name} is {value}: expected a number from 0 upwards")
        for name, known in (("name", NAMES), ("schedule", SCHEDULES), ("decay_shape", SHAPES)):
            if getattr(self, name) not in known:
                expected = f"{', '.join(known[:-1])} or {known[-1]}"
                raise UserError(f"model.optimizer.{name} is {getattr(self, name)!r}: expected {expected}")

    def ratio(self, step: int, max_steps: int) -> float:
        """Learning rate of update ``step`` (from 0) as a fraction of the peak."""
        done, warmup = step + 1, _steps(self.warmup_steps, max_steps)
        if done < warmup:
            return done / warmup
        start = max(warmup, max_steps - _steps(self.decay_steps, max_steps)) if self.schedule == "wsd" else warmup
        progress = min(1.0, max(0.0, done - start) / max(1.0, max_steps - start))
        return self.final_ratio + (1 - self.final_ratio) * self._height(progress)

    def _height(self, progress: float) -> float:
        """What is left between the peak (1) and the last learning rate (0) at a share of the decay."""
        match self.schedule, self.decay_shape:
            case "constant", _:
                return 1.0
            case "cosine", _:
                return 0.5 * (1 + math.cos(math.pi * progress))
            case "wsd", "sqrt":
                return 1 - math.sqrt(progress)
        return 1 - progress

    def build(self, module: nn.Module, fusable: bool = True, offloaded: bool = False) -> torch.optim.Optimizer:
        """The optimizer over the trainable parameters; norms (vectors) are not decayed. ``fusable``: no strategy
        replaces the parameters by its own, as DeepSpeed does. ``offloaded``: the states stay in the memory of the host,
        for which DeepSpeed has an AdamW of its own, and nothing else: UserError. Raises it as well for Muon under
        DeepSpeed, and for a factor that is for no parameter."""
        trainable = {name: each for name, each in module.named_parameters() if each.requires_grad}
        check_factors(list(trainable), self.learning_rate_factors)
        shared = (self.weight_decay, self.learning_rate_factors)
        betas = (self.beta1, self.beta2)
        if self.name == "muon" or (self.name == "auto" and fusable):
            if not fusable:
                raise UserError(NO_MUON)
            own = {name: each for name, each in trainable.items() if self._is_muons(name, each)}
            others = {name: each for name, each in trainable.items() if name not in own}
            matrices = parameter_groups(own, self.muon_learning_rate, *shared)
            rest = parameter_groups(others, self.learning_rate, *shared)
            return MuonAdamW(matrices, rest, self.muon_momentum, betas=betas)
        groups = parameter_groups(trainable, self.learning_rate, *shared)
        if self.name == "sgd":
            if offloaded:
                raise UserError("model.optimizer.name is sgd: expected adamw with strategy.offload_optimizer=true")
            return torch.optim.SGD(groups, lr=self.learning_rate, momentum=self.beta1)
        if offloaded:
            from deepspeed.ops.adam import DeepSpeedCPUAdam

            compile_operator("CPUAdamBuilder")
            return DeepSpeedCPUAdam(groups, lr=self.learning_rate, betas=betas, adamw_mode=True)
        fused = self.fused and fusable and all(each.device.type in ("cpu", "cuda") for each in trainable.values())
        return _portable(torch.optim.AdamW(groups, lr=self.learning_rate, betas=betas, fused=fused or None), fused)

    def _is_muons(self, name: str, parameter: nn.Parameter) -> bool:
        return parameter.ndim == 2 and not any(part in name for part in self.muon_excludes)


def _portable(optimizer: torch.optim.AdamW, fused: bool) -> torch.optim.AdamW:
    """Let checkpoints not tell, nor decide, whether the update is fused; and let Lightning clip its gradients: without
    the mark below a gradient scaler divides the gradients itself, before they are clipped."""

    def marking(fused: bool | None) -> Callable[[torch.optim.Optimizer, dict[str, Any]], dict[str, Any]]:
        return lambda _, state: state | {"param_groups": [{**group, "fused": fused} for group in state["param_groups"]]}

    optimizer.register_state_dict_post_hook(marking(None))
    optimizer.register_load_state_dict_pre_hook(marking(fused or None))
    optimizer._step_supports_amp_scaling = False
    return optimizer


def _steps(given: float, max_steps: int) -> float:
    return given * max_steps if given < 1 else given
