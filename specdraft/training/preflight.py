"""What can fail is checked before any work: settings, the target's presence, memory, the output directory."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import psutil
import torch
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from lightning import seed_everything
from lightning.pytorch.strategies import DeepSpeedStrategy, Strategy
from lightning.pytorch.utilities import rank_zero_only
from omegaconf import DictConfig, OmegaConf

from specdraft.drafters.checkpoint import read_config
from specdraft.entry import CONF, build
from specdraft.errors import UserError
from specdraft.evaluation import CostSettings, EvaluationSettings, Prompt, load_prompts
from specdraft.export import Engine, check_served
from specdraft.files import make_directory
from specdraft.training.boosting import check_earlier
from specdraft.training.checkpoints.resume import check_alike, check_unfinished, find_resume, resumed_optimizer
from specdraft.training.devices import claim_gpu, device_numbers, uses_gpus, wants_compiled, world_size
from specdraft.training.monitoring.silence_warnings import silence_warnings
from specdraft.training.planning.meta_target import target_config
from specdraft.training.planning.plan import Plan, make_plan
from specdraft.training.run_lock import acquire_run_lock
from specdraft.training.schedule import NO_MUON, OptimizerSettings

# Lightning's own list has no public name.
PRECISIONS = (
    *("32-true", "bf16-mixed", "16-mixed", "bf16-true", "16-true", "64-true"),
    *("32", "bf16", "16", "64", "transformer-engine", "transformer-engine-float16"),
)


@dataclass(frozen=True)
class Run:
    """What a run has besides its configuration; ``resume``: a checkpoint to go on from, ``engine``: to export for,
    ``prompts``: those of the evaluation, none without one."""

    directory: Path
    resume: Path | None
    optimizer: OptimizerSettings
    engine: Engine | None
    evaluation: EvaluationSettings
    prompts: list[Prompt]
    cost: CostSettings | None


def prepare_run(config: DictConfig) -> Run:
    """Check all that can be checked now but single values (``settings.py``), claim the GPU and the run directory, and
    seed. Raises UserError for what cannot work, before anything is loaded, computed or written over."""
    evaluation = EvaluationSettings.from_config(config.decoding, config.seed)
    cost = None if config.evaluation.cost_model is None else CostSettings(**config.evaluation.cost_model)
    directory = Path(HydraConfig.get().runtime.output_dir)
    if HydraConfig.get().mode is RunMode.MULTIRUN and (devices := world_size(config.trainer)) > 1:
        # Each job would start further processes, and each of them would run the whole sweep.
        what = f"a sweep (-m) trains on one device at a time, trainer.devices={config.trainer.devices} makes {devices}"
        raise UserError(f"{what}: set trainer.devices=1, or start the trainings one by one without -m")
    check_devices(config.trainer)
    claim_gpu(config.trainer)
    plan = check_before_work(config, directory)
    engine = build(engine_config(CONF, config.export)) if config.export else None
    if engine is not None:
        check_served(plan.drafter_kind, engine)
    prompts = load_prompts(config.evaluation.benchmark, config.evaluation.limit) if config.evaluate else []
    optimizer = build(config.model.optimizer)
    resume = find_resume(config.resume, Path(config.run_family), print)
    if resume is not None:
        check_unfinished(resume, config.trainer.max_steps)
        check_alike(resume, config)
        sharded = isinstance(build(config.strategy), DeepSpeedStrategy)
        optimizer = replace(optimizer, name=resumed_optimizer(resume, optimizer.name, sharded))
    acquire_run_lock(directory, resume)
    silence_warnings()
    seed_everything(config.seed, workers=True, verbose=False)
    return Run(directory, resume, optimizer, engine, evaluation, prompts, cost)


def check_settings(config: DictConfig) -> None:
    """Raises UserError for settings that do not go together."""
    if "callbacks" in config and config.callbacks.get("live_acceptance") is None and (config.evaluate or config.export):
        what = "callbacks.live_acceptance is missing, which chooses and saves the best head"
        raise UserError(f"{what}: expected evaluate=false and export=null without it")
    placement = OmegaConf.select(config, "target.placement")
    if placement == "device_map" and world_size(config.trainer) > 1:
        what = f"placement=device_map takes all devices for one process, and trainer.devices={config.trainer.devices}"
        raise UserError(f"{what} asks for more: set trainer.devices=1, or choose placement=zero3 or replicated")
    if placement == "zero3" and config.evaluate:
        what = "evaluate=true decodes on one rank, and a target with placement=zero3 needs all of them"
        raise UserError(f"{what}: expected evaluate=false; evaluate.py measures the drafter afterwards")


def _check_optimizer(strategy: Strategy | str, name: str) -> None:
    """Of an optimizer that DeepSpeed does not have."""
    if isinstance(strategy, DeepSpeedStrategy) and name == "muon":
        raise UserError(NO_MUON)
    if isinstance(strategy, DeepSpeedStrategy) and name == "auto":
        rank_zero_only(print)("optimizer: AdamW, as DeepSpeed cuts into pieces the matrices that Muon updates whole")


def check_devices(trainer: Mapping[str, Any]) -> None:
    """Raises UserError for devices that this machine has not, and for a precision that nobody knows."""
    accelerator, devices, precision = trainer["accelerator"], trainer["devices"], trainer["precision"]
    if accelerator not in ("auto", "cpu", "gpu", "cuda"):
        raise UserError(f"trainer.accelerator is {accelerator}: expected auto, cpu or gpu")
    if accelerator in ("gpu", "cuda") and not uses_gpus(accelerator):
        what = f"trainer.accelerator is {accelerator}, and torch finds no GPU here"
        raise UserError(f"{what}: expected one; choose trainer=cpu, or a machine with a GPU")
    if world_size(trainer) < 1:
        raise UserError(f"trainer.devices is {devices} on {trainer['num_nodes']} nodes: expected at least one of each")
    if uses_gpus(accelerator):
        numbers = device_numbers(devices) or [world_size({**trainer, "num_nodes": 1}) - 1]
        there = torch.cuda.device_count()
        if max(numbers) >= there:
            raise UserError(f"trainer.devices is {devices}, and there are {there} GPUs: ask for no more, or for auto")
    if precision != "auto" and str(precision) not in PRECISIONS:
        known = f"{', '.join(PRECISIONS[:-1])} or {PRECISIONS[-1]}"
        raise UserError(f"trainer.precision is {precision}: expected auto, {known}")


def engine_config(conf: Path, name: str) -> DictConfig:
    """The options of the serving engine ``name``. Raises UserError for one that is not in ``conf/engine``."""
    path = conf / "engine" / f"{name}.yaml"
    if not path.is_file():
        known = ", ".join(sorted(file.stem for file in path.parent.glob("*.yaml")))
        raise UserError(f"export={name} is unknown: expected {known}, or null for none")
    return cast(DictConfig, OmegaConf.load(path))


def check_before_work(config: DictConfig, directory: Path) -> Plan:
    """Raises UserError if the run cannot start: bad settings, no target, too little memory, no place to write."""
    check_settings(config)
    strategy = build(config.strategy)  # refuses what the devices do not fit
    _check_optimizer(strategy, build(config.model.optimizer).name)
    wants_compiled(config.compile, uses_gpus(config.trainer.accelerator))
    if (given := config.init_vocabulary) not in ("own", "data") or (given == "data" and config.init is None):
        wanted = "own, or data with init=CHECKPOINT, to choose its draft vocabulary anew"
        raise UserError(f"init_vocabulary is {given}, with init={config.init}: expected {wanted}")
    if config.init is not None:
        read_config(config.init)
    check_earlier(config.boost or [])
    make_directory(directory)
    plan = make_plan(config, target_config(config.target), "its own configuration")
    gpus = uses_gpus(config.trainer.accelerator)
    free = torch.cuda.mem_get_info()[0] if gpus else psutil.virtual_memory().available // max(1, plan.devices)
    if plan.memory_per_device > free:
        there = f"{'each GPU' if gpus else 'this machine'} has {free / 1e9:.1f} GB free"
        needs = f"the target {config.target.name} with its drafter needs about {plan.memory_per_device / 1e9:.1f} GB"
        mend = "choose a smaller target or data.batch_size (plan=true shows what takes how much)"
        raise UserError(f"{needs}, {there}: {mend}")
    return plan
