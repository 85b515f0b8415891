"""From a configuration, a target and its data to a trained head in ``drafter/`` of the run directory."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.loggers import Logger, WandbLogger
from omegaconf import DictConfig, OmegaConf

from specdraft.data.datamodule import DataModule
from specdraft.decoding.sampling import Sampling
from specdraft.drafters.base import Drafter
from specdraft.drafters.checkpoint import about_target
from specdraft.entry import build
from specdraft.errors import UserError
from specdraft.files import atomic_directory, atomic_file
from specdraft.targets import Target
from specdraft.training.checkpoints import RunCheckpoint, StopSignal
from specdraft.training.live_acceptance import LiveAcceptance
from specdraft.training.module import DrafterModule
from specdraft.training.progress import ProgressBar, progress
from specdraft.training.start import build_drafter
from specdraft.training.strategies import uses_gpus


def build_logger(config: DictConfig) -> Logger:
    """The logger, opened, so that a missing package or account shows before any work. Raises UserError."""
    logger = build(config.logger)
    try:
        _ = logger.experiment
    except ModuleNotFoundError as error:
        raise UserError(
            f"this logger needs a package that is not installed ({error}): install it or use logger=csv"
        ) from error
    except Exception as error:
        if not isinstance(logger, WandbLogger):
            raise
        reason = " ".join(str(error).split())
        raise UserError(f"W&B cannot be used ({reason}): run `wandb login`, or set logger.offline=true") from error
    return logger


def fit(
    config: DictConfig,
    target: Target,
    data: DataModule,
    logger: Logger,
    directory: Path,
    resume: Path | None,
    check: Callable[[Drafter], object] = lambda drafter: None,
) -> DrafterModule:
    """Train. ``directory`` then holds checkpoints/ and drafter/, the best head. ``data`` is prepared.

    ``check`` sees the drafter before it is trained, and may refuse it. Raises Interrupted once a requested stop has
    left a checkpoint, UserError for a loss that is not finite.
    """
    drafter, vocabulary = build_drafter(config, target, data)
    check(drafter)
    about = data.describe() | data.coverage(vocabulary)
    settings = OmegaConf.to_container(config, resolve=True)
    module = DrafterModule(drafter, target, build(config.model.optimizer), {"config": settings, "data": about})

    stop = StopSignal()
    live = LiveAcceptance(
        data.evaluation_prompts("validation", config.live.prompts, config.live.max_new_tokens),
        directory / "drafter",
        config.live.every_n_steps,
        config.decoding.num_draft_tokens,
        live_sampling(config),
        config.live.max_new_tokens,
        extra={
            "data": about,
            "decoding": {"num_draft_tokens": config.decoding.num_draft_tokens},
            "training": {"max_steps": config.trainer.max_steps, "seed": config.seed},
            "target": about_target(target),
        },
        stop=lambda: stop.requested,
    )
    checkpoints = RunCheckpoint(directory / "checkpoints", live, stop, config.checkpoint.every_n_steps)
    bar = progress()
    trainer = build(config.trainer, _partial_=True)(
        strategy=build(config.strategy),
        precision=_precision(config),
        logger=logger,
        callbacks=[stop, bar, live, checkpoints],
        enable_progress_bar=isinstance(bar, ProgressBar),
        default_root_dir=directory,
    )
    if resume is not None:
        bring_along(resume.parent.parent, directory)
    if uses_gpus(config.trainer.accelerator):
        torch.set_float32_matmul_precision("high")  # TF32 for what autocast leaves in fp32
    try:
        trainer.fit(module, data, ckpt_path=resume)
    except SystemExit as error:
        # Lightning turns a Ctrl-C outside our handler's reach into exit status 1.
        if isinstance(error.__context__, KeyboardInterrupt):
            raise KeyboardInterrupt from None
        raise
    finally:
        torch.set_float32_matmul_precision("highest")  # the evaluation compares tokens exactly
    return module


def live_sampling(config: DictConfig) -> Sampling:
    """How live acceptance decodes: at the first of ``decoding.temperature``."""
    temperature = config.decoding.temperature
    first = temperature if isinstance(temperature, int | float) else temperature[0]
    return Sampling(float(first), config.decoding.top_k, config.decoding.top_p)


def bring_along(earlier: Path, directory: Path) -> None:
    """Copy the best head and its checkpoint of the run that is resumed, in case nothing better follows."""
    for name in ("drafter", "checkpoints/best.ckpt"):
        source, copy = earlier / name, directory / name
        if not source.exists() or copy.exists():
            continue
        if source.is_dir():
            with atomic_directory(copy) as temporary:
                shutil.copytree(source, temporary, dirs_exist_ok=True)
        else:
            with atomic_file(copy) as temporary:
                shutil.copyfile(source, temporary)


def _precision(config: DictConfig) -> Any:
    if config.trainer.precision != "auto":
        return config.trainer.precision
    gpus = uses_gpus(config.trainer.accelerator)
    return "bf16-mixed" if gpus and torch.cuda.is_bf16_supported() else "32-true"
