"""Where the drafter's parameters, gradients and optimizer states live.

The target is not the strategy's business: it is never registered, so no strategy shards, saves or optimizes it."""

import math
import os
from collections.abc import Mapping
from typing import Any

import torch
from lightning import Trainer
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, Strategy
from torch import Tensor, nn
from torch.optim import Optimizer

from specdraft.errors import UserError
from specdraft.training.checkpoints import consolidated
from specdraft.training.compilation import compile_operator
from specdraft.training.devices import count_devices, uses_gpus, world_size


class PortableDeepSpeedStrategy(DeepSpeedStrategy):
    """Lightning's DeepSpeed strategy, which also runs on CPUs over gloo; the CUDA path is untouched."""

    def setup_environment(self) -> None:
        """Set the ranks up; on CPUs as DDP does, because Lightning refuses DeepSpeed there by a check of its own."""
        if not isinstance(self.accelerator, CPUAccelerator):
            super().setup_environment()
            return
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        # DeepSpeed fails on a device without an index.
        self.parallel_devices = [torch.device("cpu", i) for i in range(len(self.parallel_devices or ()))]
        compile_operator("ShareMemCommBuilder")
        DDPStrategy.setup_environment(self)

    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        """Backward through the engine. Lightning has divided the loss by the accumulated batches; so would DeepSpeed,
        and the gradient would be too small by their number: hidden by AdamW, but not by clipping or SGD."""
        return super().backward(closure_loss, optimizer, *args, scale_wrt_gas=False, **kwargs)

    # --- checkpoints: the same single file as of every other strategy, not DeepSpeed's pickled directories ----------

    def _setup_model_and_optimizer(self, model: nn.Module, optimizer: Optimizer | None, *args: Any) -> Any:
        """Note what the optimizer was built with: DeepSpeed replaces it by flat vectors."""
        assert optimizer is not None
        self._groups = [list(group["params"]) for group in optimizer.param_groups]
        return super()._setup_model_and_optimizer(model, optimizer, *args)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The module's state, with every parameter whole and in fp32, on the CPU of every rank."""
        assert self.lightning_module is not None
        return consolidated.full_state(self.lightning_module)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The optimizer's state as torch's own would be."""
        return consolidated.full_optimizer_state(self.deepspeed_engine.optimizer, self._groups)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """One file, written by the first rank."""
        Strategy.save_checkpoint(self, checkpoint, filepath, storage_options)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """The file of any strategy, read by every rank."""
        return Strategy.load_checkpoint(self, checkpoint_path, weights_only)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Fill the masters and the parameters."""
        assert self.lightning_module is not None
        consolidated.load_full_state(self.lightning_module, checkpoint["state_dict"])

    @property
    def lightning_restore_optimizer(self) -> bool:
        """The optimizer's state is in the file, and is ours to restore."""
        return True

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Fill this rank's part of the optimizer's state."""
        (state,) = checkpoint["optimizer_states"]
        consolidated.load_full_optimizer_state(self.deepspeed_engine.optimizer, self._groups, state)


def drop_gradients(trainer: Trainer, module: nn.Module, optimizer: Optimizer) -> None:
    """Between backward and the update: make it leave the weights and the optimizer's states as they are. Every rank
    must call it: DeepSpeed leaves out, on all of them, an update whose gradient is not finite; torch passes over
    parameters that have none."""
    if isinstance(trainer.strategy, DeepSpeedStrategy):
        from deepspeed.utils import safe_get_full_fp32_param, safe_set_full_grad

        parameter = next(each for each in module.parameters() if each.requires_grad)
        safe_set_full_grad(parameter, torch.full_like(safe_get_full_fp32_param(parameter), math.nan))
    else:
        optimizer.zero_grad(set_to_none=True)


def single(devices: int | str | list[int] = 1, num_nodes: int = 1) -> str:
    """One device. Raises UserError if the trainer asks for several."""
    if count_devices(devices, default=1) * num_nodes != 1:
        what = f"strategy=single trains on one device, but trainer.devices={devices} and trainer.num_nodes={num_nodes}"
        raise UserError(f"{what}: set trainer.devices=1 or choose strategy=ddp or strategy=deepspeed_zero2")
    return "auto"


def deepspeed(stage: int, **options: Any) -> Strategy:
    """DeepSpeed ZeRO: stage 1 shards optimizer states, 2 gradients too, 3 parameters too."""
    # DeepSpeed's default buckets (200M elements) are larger than most drafters; these keep buffers in proportion.
    defaults: dict[str, Any] = {"allgather_bucket_size": 50_000_000, "reduce_bucket_size": 50_000_000}
    if not torch.cuda.is_available():
        defaults["process_group_backend"] = "gloo"
    return PortableDeepSpeedStrategy(stage=stage, **(defaults | options))


def offloads_optimizer(strategy: Strategy) -> bool:
    """Whether the optimizer's states stay in the memory of the host."""
    config = strategy.config if isinstance(strategy, DeepSpeedStrategy) else None
    return config is not None and "offload_optimizer" in config["zero_optimization"]


def automatic(accelerator: str = "auto", devices: int | str | list[int] = "auto", num_nodes: int = 1) -> Strategy | str:
    """ZeRO-2 when several GPUs take part, DDP when several CPU processes do, else one device."""
    if world_size({"accelerator": accelerator, "devices": devices, "num_nodes": num_nodes}) == 1:
        return "auto"
    return deepspeed(stage=2) if uses_gpus(accelerator) else "ddp"
