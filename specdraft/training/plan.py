"""``plan=true``: what a run would need, before anything is loaded or launched.

Everything is computed from configurations: modules are built on the meta device, where parameters have no memory.
"""

from dataclasses import dataclass

import torch
from omegaconf import DictConfig, OmegaConf
from transformers import PreTrainedConfig

from specdraft.entry import build
from specdraft.errors import UserError
from specdraft.training import costs
from specdraft.training.blueprint import WeightlessTarget, bytes_per_parameter, shape_config, target_config
from specdraft.training.strategies import uses_gpus, world_size

# A yardstick for hours: dense bf16 peak of one H100, and the share of it that training reaches.
_PEAK, _UTILISATION = 989e12, 0.4


@dataclass(frozen=True)
class Plan:
    """The figures; bytes and FLOPs unless the name says otherwise."""

    target: str
    source: str
    target_parameters: int
    drafter: str
    drafter_parameters: int
    devices: int
    memory: dict[str, float]
    disk: dict[str, float]
    feature_bytes_per_token: float
    target_forward: float
    drafter_forward: float
    drafter_backward: float
    tokens_per_update: int
    max_steps: int

    @property
    def memory_per_device(self) -> float:
        """Bytes that each device needs."""
        return sum(self.memory.values())

    @property
    def flops_per_token(self) -> float:
        """Target forward, drafter forward and backward."""
        return self.target_forward + self.drafter_forward + self.drafter_backward

    def lines(self) -> list[str]:
        """The plan as text."""
        tokens = self.tokens_per_update * self.max_steps
        rate = _UTILISATION * _PEAK / self.flops_per_token
        rows = [
            ("target", f"{self.target}: {self.target_parameters / 1e6:,.1f} M parameters, frozen ({self.source})"),
            ("drafter", f"{self.drafter}: {self.drafter_parameters / 1e6:,.1f} M trainable parameters"),
            ("", ""),
            (f"memory per device ({self.devices} in all)", ""),
            *((f"  {name}", _bytes(size)) for name, size in self.memory.items()),
            ("  total", _bytes(self.memory_per_device)),
            ("", ""),
            ("disk", ""),
            *((f"  {name}", _bytes(size)) for name, size in self.disk.items()),
            ("  hidden states, if stored", f"{self.feature_bytes_per_token / 1024:,.1f} KiB per token"),
            ("", ""),
            ("cost per token", ""),
            ("  target forward", f"{self.target_forward / 1e9:,.3g} GFLOP"),
            ("  drafter forward", f"{self.drafter_forward / 1e9:,.3g} GFLOP"),
            ("  drafter backward", f"{self.drafter_backward / 1e9:,.3g} GFLOP"),
            ("", ""),
            ("run", f"{self.max_steps:,} steps x {self.tokens_per_update:,} tokens = {tokens / 1e6:,.2f} M tokens"),
            ("", f"{tokens * self.flops_per_token / 1e15:,.3g} PFLOP; one H100 at {_UTILISATION:.0%} of its peak: "
                 f"{rate / 1e3:,.1f} k tokens/s, {tokens / rate / 3600:,.2f} h"),
        ]  # fmt: skip
        return [f"{label:<30}{value}".rstrip() for label, value in rows]


def make_plan(config: DictConfig, architecture: PreTrainedConfig, source: str) -> Plan:
    """The plan of a training configuration for a target of this ``architecture``, which comes from ``source``."""
    target = WeightlessTarget(architecture, config.target.name)
    vocabulary = config.model.draft_vocab_size
    if vocabulary is not None and not 1 <= vocabulary <= target.vocab_size:
        raise UserError(
            f"model.draft_vocab_size is {vocabulary}: expected 1 to {target.vocab_size}, the size of the target's "
            "vocabulary, or null for all of it"
        )
    ids = None if vocabulary is None else torch.arange(vocabulary)
    with torch.device("meta"):
        drafter = build(config.model.drafter, _partial_=True)(target=target, draft_vocabulary=ids)
    trainable = sum(parameter.numel() for parameter in drafter.parameters() if parameter.requires_grad)

    rows, length = config.data.batch_size, config.data.sequence_length
    devices = world_size(config.trainer)
    gpus = uses_gpus(config.trainer.accelerator)
    mixed = gpus if config.trainer.precision == "auto" else "32" not in str(config.trainer.precision)
    element = 2 if mixed else 4
    tokens = rows * length
    sizes = costs.target_sizes(target.model, target.config)
    target_element = bytes_per_parameter(config.target.dtype, architecture)
    state = costs.state_bytes(trainable, _stage(config, devices, gpus), devices, mixed)
    passing = (4 * target.hidden_size + 3 * target.config.intermediate_size) * tokens * target_element
    features = (len(drafter.layers) + 1) * target.hidden_size
    forward, backward = drafter.training_flops(length)
    return Plan(
        target=config.target.name,
        source=source,
        target_parameters=sizes.total,
        drafter=f"{type(drafter).__name__}, draft vocabulary {vocabulary or target.vocab_size:,}",
        drafter_parameters=trainable,
        devices=devices,
        memory={
            "target weights": float(sizes.total * target_element),
            "drafter weights": state["weights"],
            "drafter gradients": state["gradients"],
            "optimizer states": state["optimizer"],
            "hidden states of a batch": float(features * tokens * target_element + passing),
            "activations (estimate)": drafter.activation_bytes(tokens, element),
        },
        disk={"checkpoints (best, last)": 2 * 12.0 * trainable, "drafter and its export": 2 * 4.0 * trainable},
        feature_bytes_per_token=float(features * target_element),
        target_forward=costs.target_forward_flops(sizes, length),
        drafter_forward=forward,
        drafter_backward=backward,
        tokens_per_update=tokens * devices * config.trainer.accumulate_grad_batches,
        max_steps=config.trainer.max_steps,
    )


def find_architecture(config: DictConfig) -> tuple[PreTrainedConfig, str]:
    """The target's configuration and where it was found; a shipped shape stands in where the hub is out of reach."""
    try:
        return target_config(config.target), "its own configuration"
    except UserError:
        shape = OmegaConf.select(config, "target_shape")  # some targets ship it
        if shape is None:
            raise
        return shape_config(shape), "published shape, as no configuration is in reach"


def _stage(config: DictConfig, devices: int, gpus: bool) -> int | None:
    if "stage" in config.strategy:
        return int(config.strategy.stage)
    automatic = config.strategy._target_.endswith(".automatic")
    return 2 if automatic and gpus and devices > 1 else None


def _bytes(size: float) -> str:
    return f"{size / 1e9:,.2f} GB" if size >= 1e8 else f"{size / 1e6:,.2f} MB"
