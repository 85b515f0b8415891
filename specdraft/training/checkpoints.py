"""Checkpoints that a run can always be resumed from: the best by acceptance length, and the last.

Everything is saved at the end of a step, never inside one: a Ctrl-C only asks, and the step that is under way ends.
"""

import shutil
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from specdraft.errors import UserError
from specdraft.training.live_acceptance import LiveAcceptance

LAST = "last.ckpt"


class Interrupted(Exception):
    """Training was asked to stop; ``checkpoint`` is where it can be resumed from."""

    def __init__(self, checkpoint: Path, step: int) -> None:
        super().__init__(f"stopped after step {step}; {checkpoint} resumes it")
        self.checkpoint = checkpoint
        self.step = step


class StopSignal(Callback):
    """Turns the first SIGINT or SIGTERM into a request; a second Ctrl-C interrupts at once."""

    def __init__(self) -> None:
        self.requested = False
        self._previous: dict[int, Any] = {}

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Install the handlers, which Python allows in the main thread only."""
        if threading.current_thread() is threading.main_thread():
            self._previous = {
                number: signal.signal(number, self._request) for number in (signal.SIGINT, signal.SIGTERM)
            }

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Give the handlers back."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous = {}

    def _request(self, number: int, frame: Any) -> None:
        self.requested = True
        signal.signal(number, self._previous[number])

    def agreed(self, trainer: Trainer) -> bool:
        """Whether any rank was asked to stop. Every rank must call it."""
        if trainer.world_size == 1:
            return self.requested
        return trainer.strategy.reduce_boolean_decision(self.requested, all=False)


class RunCheckpoint(ModelCheckpoint):
    """``best.ckpt`` by live acceptance length, ``last.ckpt`` after each measurement, at the end, when interrupted."""

    def __init__(self, directory: Path, live: LiveAcceptance, stop: StopSignal, every_n_steps: int) -> None:
        """Save the last state every ``every_n_steps`` steps and after every measurement of ``live``."""
        super().__init__(
            dirpath=directory,
            filename="best",
            monitor="acceptance_length",
            mode="max",
            save_top_k=1,
            auto_insert_metric_name=False,
            enable_version_counter=False,
        )
        self.directory = directory
        self.live = live
        self.stop = stop
        self.interval = every_n_steps

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any, **kwargs: Any) -> None:
        """Save what is due. Raises Interrupted once the state is safe."""
        stopping = self.stop.agreed(trainer)
        step = trainer.global_step
        if step and step != self._last_global_step_saved:
            measured = self.live.measured_step == step
            if measured and self.live.best_step == step:
                self._save_topk_checkpoint(trainer, self._monitor_candidates(trainer))
            due = self.interval > 0 and step % self.interval == 0
            if measured or due or stopping or step >= trainer.max_steps:
                self._save_last(trainer)
        if stopping:
            pl_module.on_train_batch_end(*args, **kwargs)  # it would come after us, and logs this step
            raise Interrupted(self.directory / LAST, step)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Save the state on an unforeseen error, in a single process (one rank's error must not start a collective).

        A UserError (a loss that is not finite) saves nothing: the last good checkpoint is worth more. Nor does a
        KeyboardInterrupt, the second Ctrl-C: it may have struck in the middle of an update.
        """
        started = trainer.global_step > 0 and trainer.global_step != self._last_global_step_saved
        foreseen = not isinstance(exception, Exception) or isinstance(exception, UserError | Interrupted)
        if started and trainer.world_size == 1 and not foreseen:
            self._save_last(trainer)

    def _save_last(self, trainer: Trainer) -> None:
        # DeepSpeed checkpoints are directories, written in place: only a rename keeps the previous one whole.
        final, fresh, old = (self.directory / name for name in (LAST, "last.new.ckpt", "last.old.ckpt"))
        self._save_checkpoint(trainer, str(fresh))
        trainer.strategy.barrier()
        if trainer.is_global_zero:
            if final.is_dir():
                final.rename(old)
            fresh.rename(final)
            shutil.rmtree(old, ignore_errors=True)
        trainer.strategy.barrier()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Nothing: epochs are no occasion of ours."""

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Nothing."""

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Nothing: the last step has saved."""


def find_resume(resume: str | None, family: Path, note: Callable[[str], None]) -> Path | None:
    """The checkpoint to continue from.

    ``resume`` is None (start anew), "auto" (the newest run below ``family``, the directory that holds the runs of one
    target and model), a ``.ckpt`` path or a run directory. Raises UserError if a given path holds no checkpoint.
    """
    if resume is None:
        return None
    if resume != "auto":
        path = Path(resume).expanduser()
        candidates = [path] if path.suffix == ".ckpt" else [path / "checkpoints" / LAST, path / LAST]
        for candidate in candidates:
            if candidate.exists():
                return candidate.resolve()
        raise UserError(f"resume={resume}: {candidates[0]} does not exist; give a run directory, a .ckpt path, or auto")
    found = sorted(family.glob(f"*/checkpoints/{LAST}"), key=lambda path: path.stat().st_mtime)
    if not found:
        note(f"resume=auto: no earlier run below {family}, starting anew")
        return None
    return found[-1].resolve()
