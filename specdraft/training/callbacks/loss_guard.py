"""What becomes of an optimizer step whose loss is not finite, or far above those before it."""

import math
import statistics
from collections import deque
from pathlib import Path
from typing import Any, cast

import torch
from lightning import Callback, LightningModule, Trainer
from safetensors.torch import save_file

from specdraft.errors import UserError
from specdraft.files import atomic_file
from specdraft.targets.batch import Batch
from specdraft.training.module import DrafterModule
from specdraft.training.strategies import drop_gradients

_REMEMBERED = 64  # losses whose median a spike is measured against
_ENOUGH = 16  # of them, before there is one


class LossGuard(Callback):
    """Writes the batches of a bad step into ``directory``, then stops the run or leaves the step out.
    It judges the loss of the whole step, of all ranks and accumulated batches, after backward and before the update.
    Every rank has the same number, so that all do the same. A step that is left out moves neither the weights nor the
    optimizer's states; it counts as a step, and the data goes on."""

    def __init__(
        self, directory: str | Path, on_bad_loss: str = "stop", spike_factor: float | None = None, max_skipped: int = 10
    ) -> None:
        """``spike_factor``: a loss that many times the median of the last 64 is bad as well; None: none is.
        ``max_skipped``: the run stops at the next one."""
        if on_bad_loss not in ("stop", "skip"):
            raise UserError(f"guard.on_bad_loss is {on_bad_loss!r}: expected stop or skip")
        if spike_factor is not None and not spike_factor > 1:
            raise UserError(f"guard.spike_factor is {spike_factor}: expected a number above 1, or null for no guard")
        self.directory = Path(directory)
        self.skips, self.spike_factor, self.max_skipped = on_bad_loss == "skip", spike_factor, max_skipped
        self.losses: deque[float] = deque(maxlen=_REMEMBERED)
        self.skipped = 0

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        """Judge the step. Raises UserError on every rank if the run is to stop: the weights are those before it."""
        module = cast(DrafterModule, pl_module)
        if not module.ends_step():
            return
        batches = module.step_batches
        loss = torch.stack([each for _, _, each in batches]).sum() / len(batches)
        loss = trainer.strategy.reduce(loss, reduce_op="mean")
        reason = self._reason(float(loss))
        if reason is None:
            self.losses.append(float(loss))
            return
        path = self._write(trainer, batches)
        self.skipped += 1
        what = f"the training loss is {loss:.6g} at step {trainer.global_step} (batch {batches[0][0]}), {reason}"
        if not self.skips or self.skipped > self.max_skipped:
            limit = f" after {self.max_skipped} steps were left out (guard.max_skipped)" if self.skips else ""
            raise UserError(
                f"{what}{limit}; its batches are in {path}: lower model.optimizer.learning_rate, check the data and "
                "the target's dtype, or leave such steps out with guard.on_bad_loss=skip"
            )
        drop_gradients(trainer, module.drafter, optimizer)
        module.leave_out_step()
        if trainer.is_global_zero:
            print(f"{what}: the step is left out; its batches are in {path}", flush=True)

    def _reason(self, loss: float) -> str | None:
        if not math.isfinite(loss):
            return "expected a finite number"
        if self.spike_factor is None or len(self.losses) < _ENOUGH:
            return None
        usual = statistics.median(self.losses)
        if loss <= self.spike_factor * usual:
            return None
        return f"expected at most {self.spike_factor:g} times the median of the last {len(self.losses)}, {usual:.6g}"

    def _write(self, trainer: Trainer, batches: list[tuple[int, Batch, torch.Tensor]]) -> Path:
        """This rank's sequences ``[R, T]`` of the step, their numbers in the data, and the losses of its batches."""
        fields = ("input_ids", "position_ids", "document_ids", "loss_mask")
        tensors = {name: torch.cat([getattr(batch, name).cpu() for _, batch, _ in batches]) for name in fields}
        tensors["losses"] = torch.stack([loss for _, _, loss in batches]).cpu()
        indices = getattr(trainer.datamodule, "step_indices", None)  # type: ignore[attr-defined]
        if indices is not None:
            tensors["sequences"] = torch.tensor(indices(batches[0][0]))
        step, rank, numbers = trainer.global_step, trainer.global_rank, [number for number, _, _ in batches]
        path = self.directory / f"step-{step:06d}-rank-{rank}.safetensors"
        with atomic_file(path) as temporary:
            save_file(tensors, temporary, metadata={"step": str(step), "rank": str(rank), "batches": str(numbers)})
        return path

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run must know to judge as this one would."""
        return {"losses": list(self.losses), "skipped": self.skipped}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue."""
        self.losses.extend(state_dict["losses"])
        self.skipped = state_dict["skipped"]
