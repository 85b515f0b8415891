"""What a rank of ``test_faults.py`` does: trains for as long as it is let."""

import os
import resource
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from lightning import Callback, Trainer, seed_everything

from specdraft.targets import Target
from specdraft.training.callbacks.checkpoint import RunCheckpoint
from specdraft.training.callbacks.loss_guard import LossGuard
from specdraft.training.callbacks.rank_heartbeat import RankHeartbeat, broken_connections_explained
from specdraft.training.callbacks.stop_signal import Interrupted, StopSignal
from specdraft.training.monitoring.silence_warnings import silence_warnings
from specdraft.training.schedule import OptimizerSettings
from tests.training.ranks_worker import ADAMW, FAMILIES, GLOBAL_BATCH, Recording, Rows, make_model


class Signal(Callback):
    """The second rank sends itself a signal in the midst of a step."""

    def __init__(self, step: int, number: int) -> None:
        self.step, self.number = step, number

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step == self.step - 1 and trainer.global_rank == 1:
            os.kill(os.getpid(), self.number)


class Tell(Callback):
    """Says which step is done."""

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        print(f"step {trainer.global_step}.", flush=True)


class Part(Callback):
    """From a step on, the ranks are in different collectives, and stay there."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_start(self, *_: Any) -> None:
        self.other = torch.distributed.new_group()

    def on_before_zero_grad(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step == self.step:
            print("parting", flush=True)
            if trainer.global_rank:
                torch.distributed.all_reduce(torch.zeros(1), group=self.other)
            else:
                torch.distributed.broadcast(torch.zeros(1), 1)


class FillDisk(Callback):
    """From a step on, no file may grow beyond a number of bytes."""

    def __init__(self, step: int, size: int) -> None:
        self.step, self.size = step, size

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step == self.step:
            resource.setrlimit(resource.RLIMIT_FSIZE, (self.size, self.size))


def train(
    directory: Path,
    steps: int,
    every: int = 2,
    resume: Path | None = None,
    silence: float = 30.0,
    fault: Callback | None = None,
    patience: float = 600.0,
    grace: float = 30.0,
) -> None:
    """A run of ``train.py``'s parts, in as many ranks as there are."""
    torch.set_num_threads(1)
    silence_warnings()
    seed_everything(1, verbose=False)
    target = Target.from_model(make_model(), name="random")
    settings = OptimizerSettings(warmup_steps=0, **ADAMW)
    module = Recording(FAMILIES["eagle3"](target).train(), target, settings)
    checkpoints = directory / "checkpoints"
    callbacks: list[Callback] = [
        StopSignal(grace),
        LossGuard(directory / "bad-batches"),
        RunCheckpoint(checkpoints, every, keep=2),
        RankHeartbeat(checkpoints, silence, patience),
        Tell(),
    ]
    callbacks += [fault] if fault else []
    ranks = int(os.environ["WORLD_SIZE"])
    trainer = Trainer(
        accelerator="cpu",
        devices=ranks,
        strategy="auto" if ranks == 1 else "ddp",
        max_steps=steps,
        log_every_n_steps=1,
        limit_val_batches=0,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        callbacks=callbacks,
    )
    with suppress(Interrupted), broken_connections_explained(checkpoints):
        trainer.fit(module, Rows(GLOBAL_BATCH // ranks), ckpt_path=resume, weights_only=True)
    if trainer.is_global_zero:
        torch.save({"losses": module.losses, "step": trainer.global_step}, directory / "result.pt")


def hold(directory: Path) -> None:
    """Claim a directory and wait to be killed."""
    from specdraft.training.run_lock import acquire_run_lock

    acquire_run_lock(directory)
    print("claimed", flush=True)
    os.read(os.pipe()[0], 1)
