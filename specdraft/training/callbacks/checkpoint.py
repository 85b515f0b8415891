"""Checkpoints that a run can always be resumed from: the best by acceptance length, and the last.

Everything is saved at the end of a step, never inside one: a Ctrl-C only asks, and the step that is under way ends."""

from pathlib import Path
from typing import Any, cast

import torch
from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO

from specdraft.data.datamodule import DataModule
from specdraft.errors import UserError
from specdraft.files import atomic_file
from specdraft.training.activity import SAVING
from specdraft.training.callbacks import find_callback
from specdraft.training.callbacks.live_acceptance import LiveAcceptance
from specdraft.training.callbacks.stop_signal import Interrupted, StopSignal
from specdraft.training.checkpoints.file import CheckpointFile
from specdraft.training.checkpoints.resume import LAST, by_step, step_name
from specdraft.training.module import DrafterModule


class RunCheckpoint(ModelCheckpoint):
    """``best.ckpt`` by live acceptance length, and the last ``keep`` states as ``step-NNNNNN.ckpt``.

    A state is saved every so many steps, after each measurement, at the end, and when interrupted. ``last.ckpt`` is a
    link to the newest; an earlier one is what a run resumes from if the newest is damaged. Files may be written while
    training goes on. They are waited for before the next one, and before training ends."""

    def __init__(self, directory: str | Path, every_n_steps: int, keep: int, asynchronous: bool = False) -> None:
        """Save the last state every ``every_n_steps`` steps; ``asynchronous``: from a copy, in a thread."""
        names: Any = {"auto_insert_metric_name": False, "enable_version_counter": False}
        super().__init__(directory, "best", "acceptance_length", mode="max", **names)
        self.directory = Path(directory)
        self.live: LiveAcceptance | None = None
        self.stop: StopSignal | None = None
        self.interval, self.keep = every_n_steps, keep
        self.file = CheckpointFile()
        self.background = AsyncCheckpointIO(self.file) if asynchronous else None
        self._unlinked: int | None = None  # the step of the newest state, while it may not be whole
        self._step = 0  # steps done at the last batch

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Every strategy writes the same file; what a kill left half written goes."""
        super().setup(trainer, pl_module, stage)
        self.live, self.stop = find_callback(trainer, LiveAcceptance), find_callback(trainer, StopSignal)
        trainer.strategy.checkpoint_io = self.background or self.file
        if trainer.is_global_zero:
            for half in self.directory.glob(".*.ckpt.*.tmp"):
                half.unlink()

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Count the batches that are done as this run deals them out."""
        if isinstance(trainer.datamodule, DataModule):  # type: ignore[attr-defined]
            reset_batch_progress(trainer, checkpoint)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """A resumed run has saved its first state."""
        super().on_train_start(trainer, pl_module)
        self._step = trainer.global_step
        if self.live is None or self.live.best is None:  # nor is a state of the resumed run a rival
            self.best_k_models.clear()
            self.best_model_score, self.kth_value = None, torch.tensor(-torch.inf)
            self.best_model_path = self.kth_best_model_path = ""

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any, **kwargs: Any) -> None:
        """Save what is due at the end of an optimizer step, as gradients of accumulated batches are in no checkpoint.
        Raises Interrupted once the state is safe."""
        if trainer.global_step == self._step:
            return
        self._step = trainer.global_step
        if self._save(trainer, cast(DrafterModule, pl_module), trainer.global_step >= trainer.max_steps):
            pl_module.on_train_batch_end(*args, **kwargs)  # it would come after us, and logs this step
            raise Interrupted(self.directory / LAST, self._step)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save what a run has that ends before ``trainer.max_steps``, after a time, say: as at the end of its last
        batch, although Lightning has counted batch and epoch by now. Epochs are no other occasion of ours."""
        if trainer.global_step >= trainer.max_steps or not trainer.fit_loop.done:
            return
        progress = trainer.fit_loop.epoch_progress, trainer.fit_loop.epoch_loop.batch_progress
        counted = [each.state_dict() for each in progress]
        for epochs, batches in zip(*((each.current, each.total) for each in progress), strict=True):
            epochs.processed, epochs.completed = epochs.processed - 1, epochs.processed - 1
            batches.completed = batches.processed - 1
        stopping = self._save(trainer, cast(DrafterModule, pl_module), ending=True)
        for each, state in zip(progress, counted, strict=True):
            each.load_state_dict(state)
        if stopping:
            raise Interrupted(self.directory / LAST, trainer.global_step)

    def _save(self, trainer: Trainer, module: DrafterModule, ending: bool) -> bool:
        """Save what is due; whether the run was asked to stop."""
        step, stopping = trainer.global_step, self.stop is not None and self.stop.agreed(trainer)
        measured = self.live is not None and self.live.measured_step == step
        ending = ending or stopping
        if measured or ending or (self.interval > 0 and step % self.interval == 0):
            with module.activity.during(SAVING):
                self._settle(trainer)
                if self.live is not None and measured and self.live.best_step == step:
                    self._save_topk_checkpoint(trainer, self._monitor_candidates(trainer))
                self._save_last(trainer)
                if ending or self.background is None:
                    self._settle(trainer)
        return stopping

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Save the state on an unforeseen error, in a single process (one rank's error must not start a collective).
        Not on a UserError (a loss that is not finite): the last good checkpoint is worth more; nor on a
        KeyboardInterrupt, the second Ctrl-C: it may have struck in the middle of an update."""
        unsaved = trainer.global_step not in (0, self._last_global_step_saved)
        batches: Any = trainer.fit_loop.epoch_loop.batch_progress.current
        between = batches.processed % trainer.accumulate_grad_batches == 0
        unforeseen = isinstance(exception, Exception) and not isinstance(exception, UserError | Interrupted)
        self._finish()
        if unsaved and between and unforeseen and trainer.world_size == 1:
            self._save_last(trainer)
            self._finish()

    def _save_last(self, trainer: Trainer) -> None:
        self._save_checkpoint(trainer, str(self.directory / step_name(trainer.global_step)))
        self._unlinked = trainer.global_step if trainer.is_global_zero else None

    def _settle(self, trainer: Trainer) -> None:
        """See to it that all files are whole. Raises UserError on every rank if one could not be written."""
        failure = trainer.strategy.broadcast(self._finish())
        if failure is not None:
            last = self.directory / LAST
            kept = f"{last.resolve()} is whole and resumes the run" if last.exists() else "there is no earlier one"
            raise UserError(f"the checkpoint {failure}: free some space or choose another hydra.run.dir; {kept}")
        trainer.strategy.barrier()

    def _finish(self) -> str | None:
        """Wait for what is being written, and link to the newest state; what went wrong, if something did."""
        if self.background is not None:
            self.background.teardown()
        failure, self.file.failure = self.file.failure, None
        if failure is None and self._unlinked is not None:
            with atomic_file(self.directory / LAST) as link:
                link.symlink_to(step_name(self._unlinked))
            for old in by_step(self.directory, until=self._unlinked)[self.keep :]:
                old.unlink()
        self._unlinked = None
        return failure

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Nothing."""


def reset_batch_progress(trainer: Trainer, checkpoint: dict[str, Any]) -> None:
    """Make Lightning's counts of batches those of this run: an optimizer step may have been other batches, on other
    ranks, when ``checkpoint`` was written."""
    data: DataModule = trainer.datamodule  # type: ignore[attr-defined]
    progress = checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]
    done = {"current": data.batches_done(), "total": checkpoint["global_step"] * trainer.accumulate_grad_batches}
    for name, batches in done.items():
        counts = progress[name]
        behind = counts["processed"] - counts["completed"]  # the batch at whose end it was saved
        counts |= {"ready": batches, "started": batches, "processed": batches, "completed": batches - behind}
