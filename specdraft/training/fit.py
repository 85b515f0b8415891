"""From a configuration, a target and its data to a trained head in ``drafter/`` of the run directory."""

import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.loggers import Logger
from omegaconf import DictConfig, OmegaConf

from specdraft.data.datamodule import DataModule
from specdraft.decoding.sampling import Sampling
from specdraft.drafters.base import Drafter
from specdraft.drafters.checkpoint import about_target
from specdraft.entry import build
from specdraft.files import atomic_directory, atomic_file
from specdraft.redaction import redact
from specdraft.targets import Target
from specdraft.training.callbacks.checkpoint import RunCheckpoint, StopSignal
from specdraft.training.callbacks.live_acceptance import LiveAcceptance
from specdraft.training.callbacks.loss_guard import LossGuard
from specdraft.training.callbacks.progress import ProgressBar, progress
from specdraft.training.callbacks.rank_heartbeat import RankHeartbeat, broken_connections_explained
from specdraft.training.checkpoints.resume import CHECKPOINTS
from specdraft.training.module import DrafterModule
from specdraft.training.monitoring.gauges import flops_per_token
from specdraft.training.monitoring.identity import log_identity
from specdraft.training.monitoring.loggers import close
from specdraft.training.start import build_drafter
from specdraft.training.strategies import uses_gpus
from specdraft.training.summary import summary


def fit(
    config: DictConfig,
    target: Target,
    data: DataModule,
    loggers: list[Logger],
    directory: Path,
    resume: Path | None,
    check: Callable[[Drafter], object] = lambda drafter: None,
) -> DrafterModule:
    """Train. ``directory`` then holds checkpoints/ and drafter/, the best head. ``data`` is prepared.

    ``check`` sees the drafter before it is trained, and may refuse it. Raises Interrupted once a requested stop has
    left a checkpoint, UserError for a loss that is not finite.
    """
    drafter, vocabulary = build_drafter(config, target, data)
    data.check_reads(drafter)
    check(drafter)
    about = data.describe() | data.coverage(vocabulary)
    settings: Any = OmegaConf.to_container(config, resolve=True)
    length = min(config.data.sequence_length, target.max_length)
    flops = flops_per_token(target, drafter, length, stored=config.data.store is not None)
    describe = redact({"config": settings, "data": about})
    module = DrafterModule(drafter, target, build(config.model.optimizer), describe, flops)
    log_identity(loggers, redact(settings), about, target, data)

    stop = StopSignal()
    prompts = data.evaluation_prompts("validation", config.live.prompts, config.live.max_new_tokens)
    live = LiveAcceptance(
        [ids for _, ids in prompts],
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
        categories=[category for category, _ in prompts],
    )
    checkpoints = RunCheckpoint(
        directory / CHECKPOINTS,
        live,
        stop,
        config.checkpoint.every_n_steps,
        config.checkpoint.keep,
        config.checkpoint.asynchronous,
    )
    guard = LossGuard(directory / "bad-batches", **config.guard)
    bar = progress()
    trainer = build(config.trainer, _partial_=True)(
        strategy=build(config.strategy),
        precision=_precision(config),
        logger=loggers or False,
        callbacks=[stop, bar, guard, live, checkpoints, RankHeartbeat(checkpoints.directory)],
        enable_progress_bar=isinstance(bar, ProgressBar),
        default_root_dir=directory,
    )
    if resume is not None:
        copy_best_from_resumed(resume, directory)
    if uses_gpus(config.trainer.accelerator):
        torch.set_float32_matmul_precision("high")  # TF32 for what autocast leaves in fp32
    started = time.perf_counter()
    try:
        with broken_connections_explained(checkpoints.directory):
            trainer.fit(module, data, ckpt_path=resume, weights_only=True)
    except SystemExit as error:
        # Lightning turns a Ctrl-C outside our handler's reach into exit status 1.
        if isinstance(error.__context__, KeyboardInterrupt):
            raise KeyboardInterrupt from None
        raise
    finally:
        torch.set_float32_matmul_precision("highest")  # the evaluation compares tokens exactly
        close(loggers)
    if trainer.is_global_zero:
        print(f"\n{summary(module, live, time.perf_counter() - started)}")
    return module


def live_sampling(config: DictConfig) -> Sampling:
    """How live acceptance decodes: at the first of ``decoding.temperature``."""
    temperature = config.decoding.temperature
    first = temperature if isinstance(temperature, int | float) else temperature[0]
    return Sampling(float(first), config.decoding.top_k, config.decoding.top_p)


def copy_best_from_resumed(resume: Path, directory: Path) -> None:
    """Copy the best head and its checkpoint of the run that is resumed, in case nothing better follows."""
    if resume.parent.name != CHECKPOINTS:
        return  # a file by itself: what lies around it is not of its run
    earlier = resume.parent.parent
    for name in ("drafter", f"{CHECKPOINTS}/best.ckpt"):
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
