"""What a person sees while training: a bar on a terminal, a line now and then elsewhere."""

import sys
import time
from typing import Any

from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import TQDMProgressBar

from specdraft.training.module import log_interval

_SHOWN = {"loss": "train/loss", "acceptance_length": "acceptance_length", "tokens/s": "train/tokens_per_second"}


def progress() -> Callback:
    """The callback for this standard error: a bar on a terminal, else lines."""
    return ProgressBar() if sys.stderr.isatty() else ProgressLines()


def _values(trainer: Trainer) -> dict[str, str]:
    metrics = trainer.callback_metrics
    values = {label: float(metrics[name]) for label, name in _SHOWN.items() if name in metrics}
    return {label: f"{value:,.0f}" if value >= 1000 else f"{value:.4g}" for label, value in values.items()}


class ProgressBar(TQDMProgressBar):
    """Lightning's bar, which shows the loss, the live acceptance length and the tokens per second."""

    def get_metrics(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, Any]:
        """The few numbers worth a place in the bar."""
        return dict(_values(trainer))


class ProgressLines(Callback):
    """One line at every logged step, for files and pipes, where a bar would leave thousands of carriage returns."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the clock."""
        self._start, self._printed = time.perf_counter(), trainer.global_step

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Print what the step before has logged; its own end comes before the module's values of that step."""
        self._print(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Print the last step."""
        self._print(trainer)

    def _print(self, trainer: Trainer) -> None:
        step = trainer.global_step
        due = step % log_interval(trainer) == 0 or step >= trainer.max_steps
        if trainer.is_global_zero and due and step != self._printed:
            self._printed = step
            values = "  ".join(f"{label} {value}" for label, value in _values(trainer).items())
            seconds = time.perf_counter() - self._start
            print(f"step {step}/{trainer.max_steps}  {values}  {seconds:.0f} s", file=sys.stderr, flush=True)
