"""``plan=true``: what a run would need, before anything is loaded or launched.

Everything is computed from configurations: modules are built on the meta device, where parameters have no memory."""

from dataclasses import dataclass
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from transformers import PreTrainedConfig

from specdraft.drafters.base import Drafter
from specdraft.drafters.quantization import quantize
from specdraft.drafters.vocabulary import DraftVocabulary
from specdraft.entry import build
from specdraft.errors import UserError
from specdraft.rendering import render
from specdraft.targets.loading import check_options
from specdraft.targets.parameters import target_sizes
from specdraft.targets.target import PLACEMENTS
from specdraft.tensors import difference, kinds
from specdraft.training.devices import uses_gpus, wants_compiled, world_size
from specdraft.training.planning import costs
from specdraft.training.planning.gpus import PER_NODE, find_gpu
from specdraft.training.planning.meta_target import MetaTarget, bytes_per_parameter, shape_config, target_config

_GPUS = ("gpu", "cuda")


@dataclass(frozen=True)
class Plan:
    """The figures; bytes and FLOPs unless the name says otherwise."""

    target: str
    source: str
    target_parameters: int
    drafter: str
    drafter_kind: type[Drafter]  # as it is served
    drafter_parameters: int
    gpu: str
    devices: int
    partitioned: bool
    memory: dict[str, float]
    memory_there: float
    seconds: dict[str, float]
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

    @property
    def advice(self) -> str:
        """What makes the largest part of the memory smaller."""
        if max(self.memory, key=self.memory.__getitem__) != "target weights":
            return "a smaller data.batch_size or data.sequence_length, or strategy=deepspeed_zero2 on more GPUs"
        if self.partitioned:
            return f"more GPUs, which share the target: planning.gpus={2 * self.devices}"
        return f"cutting the target over GPUs: target.placement=zero3 planning.gpus={max(8, self.devices)}"

    @property
    def bottleneck(self) -> str:
        """What takes longest in an update; the rest happens meanwhile."""
        return max(self.seconds, key=self.seconds.__getitem__)

    @property
    def tokens_per_second(self) -> float:
        """Of all GPUs together."""
        return self.tokens_per_update / self.seconds[self.bottleneck]

    def hours(self, tokens: float) -> float:
        """That so many tokens take."""
        return tokens / self.tokens_per_second / 3600

    def lines(self) -> list[str]:
        """The plan as text."""
        return render("training/planning/plan.txt.jinja", plan=self).splitlines()


def make_plan(config: DictConfig, architecture: PreTrainedConfig, source: str) -> Plan:
    """The plan of a training configuration for a target of this ``architecture``, which comes from ``source``."""
    target = MetaTarget(architecture, config.target.name, config.target.get("trust_remote_code", False))
    vocabulary = config.model.draft_vocab_size
    if vocabulary is not None and not (isinstance(vocabulary, int) and 1 <= vocabulary <= target.vocab_size):
        what = f"model.draft_vocab_size is {vocabulary}: expected 1 to {target.vocab_size}"
        raise UserError(f"{what}, or null for all of the target's")
    ids = None if vocabulary is None else torch.arange(vocabulary)
    with torch.device("meta"):
        drafter = build(config.model.drafter, _partial_=True)(target=target, draft_vocabulary=ids)
    if vocabulary not in (None, target.vocab_size) and not isinstance(drafter, DraftVocabulary):
        what = f"model.draft_vocab_size is {vocabulary}, and {type(drafter).__name__} projects to all tokens"
        raise UserError(f"{what}: expected null, or a drafter that is a DraftVocabulary (docs/add-a-drafter.md)")
    _check_rebuilt(drafter.served())
    quantize(drafter, config.quantize)  # refuses what cannot be, before anything is loaded
    trainable = sum(parameter.numel() for parameter in drafter.parameters() if parameter.requires_grad)

    length = config.data.sequence_length
    planning = config.planning
    devices, placement = _devices(config), OmegaConf.select(config, "target.placement", default="replicated")
    if placement not in PLACEMENTS:
        raise UserError(f"target.placement is {placement!r}: expected one of {', '.join(PLACEMENTS)}")
    gpus = planning.gpus is not None or config.trainer.accelerator in _GPUS or uses_gpus(config.trainer.accelerator)
    mixed = gpus if config.trainer.precision == "auto" else "32" not in str(config.trainer.precision)
    element = 2 if mixed else 4
    tokens = config.data.batch_size * length
    sizes = target_sizes(target.model, target.config)
    target_element = bytes_per_parameter(config.target.dtype, architecture)
    stage = _stage(config, devices, gpus)
    passing = (4 * target.hidden_size + 3 * target.config.intermediate_size) * tokens * target_element
    if config.target.attn_implementation == "eager" or not type(target.model)._supports_sdpa:
        # Scores, their mask added, shifted by the maximum, and their softmax.
        passing += 4 * target.config.num_attention_heads * length * tokens * target_element
    features = (len(drafter.layers) + 1) * target.hidden_size
    memory = {
        "target weights": costs.target_weight_bytes(sizes, target_element, devices, placement),
        **costs.state_bytes(trainable, stage, devices, mixed),
        "hidden states of a batch": float(features * tokens * target_element),
    }
    drafter.compiled = wants_compiled(config.compile, gpus) and stage != 3  # see drafters/eagle/compiled.py
    activations = drafter.activation_bytes(tokens, element)
    free = max(0.0, find_gpu(planning.gpu).memory - sum(memory.values()) - activations) if gpus else None
    loss = costs.loss_bytes(drafter, tokens, target.vocab_size, vocabulary or target.vocab_size, free)
    forward, backward = drafter.training_flops(length)
    target_forward = costs.target_forward_flops(sizes, length)
    partitioned = placement == "zero3" and devices > 1
    shape = (target.hidden_size, target.vocab_size, vocabulary or target.vocab_size)
    stored, served = config.data.store is not None, placement == "remote"
    reads = not (stored or served)  # the target reads the batch here, before the drafter begins
    work = {
        "computation": tokens * (reads * target_forward + forward + backward),
        "loss": costs.loss_traffic(drafter, tokens, shape, element, gpus),
        "served": (served and not stored) * tokens * target_forward / _servers(config),
        "stored": stored * float(features * tokens * target_element),
        "weights": (sizes.total if reads else sizes.total - sizes.layers) * target_element + 3.0 * element * trainable,
        "gathered": partitioned * sizes.layers * target_element + (stage == 3) * 2.0 * element * trainable,
        "update": 4.0 * trainable,
    }
    return Plan(
        target=config.target.name,
        source=source,
        target_parameters=sizes.total,
        drafter=f"{type(drafter).__name__}, draft vocabulary {vocabulary or target.vocab_size:,}",
        drafter_kind=type(drafter.served()),
        drafter_parameters=trainable,
        gpu=planning.gpu,
        devices=devices,
        partitioned=partitioned,
        memory={
            **memory,
            # The target has read the batch before the drafter begins.
            "activations and loss": max(float(passing), activations + loss),
        },
        memory_there=find_gpu(planning.gpu).memory,
        seconds=_seconds(config, devices, work),
        disk={
            "checkpoints": (1 + config.checkpoint.keep) * 12.0 * trainable,
            "drafter and its export": 2 * 4.0 * trainable,
        },
        feature_bytes_per_token=float(features * target_element),
        target_forward=target_forward,
        drafter_forward=forward,
        drafter_backward=backward,
        tokens_per_update=tokens * devices * config.trainer.accumulate_grad_batches,
        max_steps=config.trainer.max_steps,
    )


def _check_rebuilt(drafter: Drafter) -> None:
    """Raises UserError for one that a checkpoint could not rebuild: after all of a training, it would be lost."""
    try:
        with torch.device("meta"):
            amiss = difference(kinds(type(drafter)(**drafter.config()).state_dict()), kinds(drafter.state_dict()))
    except TypeError as error:
        amiss = str(error)
    if amiss:
        mend = "expected all that its constructor takes, noted with constructor_arguments (docs/add-a-drafter.md)"
        raise UserError(f"the checkpoint of {type(drafter).__name__} could not be loaded ({amiss}): {mend}")


def find_architecture(config: DictConfig) -> tuple[PreTrainedConfig, str]:
    """The target's configuration and where it was found; a shipped shape stands in where the hub is out of reach.
    Raises UserError where neither is there, and for options that the target's chat template does not name."""
    try:
        found = target_config(config.target)
    except UserError:
        shape = OmegaConf.select(config, "target_shape")  # some targets ship it
        if shape is None:
            raise
        published: Any = OmegaConf.to_container(shape, resolve=True)
        return shape_config(published), "published shape, as no configuration is in reach"
    check_options(config.target)
    return found, "its own configuration"


def _devices(config: DictConfig) -> int:
    """How many take part; a machine without GPUs plans for nodes full of them where GPUs are asked for."""
    planned = config.planning.gpus
    if planned is None and config.trainer.accelerator in _GPUS and not torch.cuda.is_available():
        counted = PER_NODE if str(config.trainer.devices) == "auto" else config.trainer.devices
        return world_size({**config.trainer, "devices": counted})
    if planned is None:
        return world_size(config.trainer)
    if type(planned) is not int or planned < 1:
        raise UserError(f"planning.gpus is {planned}: expected a positive number, or null for trainer.devices")
    return planned


def _seconds(config: DictConfig, devices: int, work: dict[str, float]) -> dict[str, float]:
    """What an update takes if one thing alone limits it. ``work``, of a device and a batch: FLOPs of "computation" and
    of a target that is "served", bytes that the "loss" moves, those of hidden states that are "stored", of "weights"
    read and of those "gathered" from other devices; of an "update", bytes of gradients."""
    gpu, batches = find_gpu(config.planning.gpu), config.trainer.accumulate_grad_batches
    # Across nodes every GPU's network card carries a share of what each node must receive.
    reach = gpu.link if devices <= PER_NODE else min(gpu.link, PER_NODE * gpu.network)
    abroad = (devices - 1) / devices
    nodes, rate = -(-devices // PER_NODE), config.planning.utilization * gpu.flops
    seconds = {
        # On one stream, one after the other; what others do meanwhile is below.
        "computation": batches * (work["computation"] / rate + work["loss"] / gpu.bandwidth),
        # Masters, moments and gradients are read, all but the last written: 7 fp32 numbers a parameter.
        "memory bandwidth": (batches * work["weights"] + 7 * work["update"]) / gpu.bandwidth,
        "communication": abroad * (batches * work["gathered"] + 2 * work["update"]) / reach,
        "servers": batches * devices * work["served"] / rate,
        "disk": batches * devices * work["stored"] / (nodes * config.planning.disk * 1e9),
    }
    return {name: value for name, value in seconds.items() if value or name not in ("servers", "disk")}


def _servers(config: DictConfig) -> int:
    """Those that read for a target with placement=remote: GPUs of the planned kind."""
    url = OmegaConf.select(config, "target.url")
    return max(1, len(url)) if OmegaConf.is_list(url) else 1


def _stage(config: DictConfig, devices: int, gpus: bool) -> int | None:
    if "stage" in config.strategy:
        return int(config.strategy.stage)
    automatic = config.strategy._target_.endswith(".automatic")
    return 2 if automatic and gpus and devices > 1 else None
