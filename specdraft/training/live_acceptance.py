"""Live acceptance: while training, really decode held-out prompts with the current head, and keep the best one.

Acceptance words are those of ``specdraft.decoding.metrics``. Prompts are dealt out over the ranks; the counts are
summed, then divided once.
"""

import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from lightning import Callback, LightningModule, Trainer
from torch import Tensor

from specdraft.decoding.decoder import Decoder
from specdraft.decoding.metrics import AcceptanceCounts
from specdraft.decoding.sampling import Sampling
from specdraft.drafters.base import Drafter
from specdraft.drafters.checkpoint import save_drafter
from specdraft.training.weights import full_precision_drafter

if TYPE_CHECKING:
    from specdraft.training.module import DrafterModule


class LiveAcceptance(Callback):
    """Measure acceptance every ``every_n_steps`` optimizer steps and after the last one.

    The best head so far, by acceptance length, lies in ``directory`` at any time after the first measurement.
    """

    def __init__(
        self,
        prompts: Sequence[Sequence[int]],
        directory: Path,
        every_n_steps: int = 100,
        num_draft_tokens: int = 5,
        sampling: Sampling | None = None,
        max_new_tokens: int = 64,
        extra: dict[str, Any] | None = None,
        stop: Callable[[], bool] = lambda: False,
    ) -> None:
        """Decode ``prompts`` (token ids), unless ``stop()``; ``extra`` goes into the saved head's config."""
        self.prompts = prompts
        self.directory = directory
        self.every_n_steps = every_n_steps
        self.num_draft_tokens = num_draft_tokens
        self.sampling = sampling or Sampling()
        self.max_new_tokens = max_new_tokens
        self.extra = extra or {}
        self.best: float | None = None
        self.best_step = 0
        self.measured_step: int | None = None
        self.stop = stop

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Measure when it is time."""
        module = cast("DrafterModule", pl_module)
        step = trainer.global_step
        due = self.every_n_steps > 0 and step % self.every_n_steps == 0
        if step and step != self.measured_step and (due or step >= trainer.max_steps):
            module.stopwatch.pause()
            self.measure(trainer, module)
            module.stopwatch.start()

    def measure(self, trainer: Trainer, module: "DrafterModule") -> None:
        """Decode, log, and save the head if it is the best so far."""
        drafter = full_precision_drafter(trainer, module)
        start = time.perf_counter()
        counts = self._decode(trainer, module, drafter)
        if counts is None:
            return
        step = trainer.global_step
        self.measured_step = step
        # Without a single round (every text ended with its first token) nothing was accepted either.
        length = counts.acceptance_length if counts.rounds else 1.0
        values = {
            "acceptance_length": length,
            "draft_acceptance_rate": counts.draft_acceptance_rate,
            "live_acceptance_seconds": time.perf_counter() - start,
        }
        for position, rate in enumerate(counts.conditional_acceptance_rate, start=1):
            values[f"conditional_acceptance_rate_{position}"] = rate
        module.publish({name: value for name, value in values.items() if not math.isnan(value)})
        if self.best is None or length > self.best:
            self.best, self.best_step = length, step
            if trainer.is_global_zero:
                training = {"step": step, "live_acceptance_length": self.best} | self.extra.get("training", {})
                save_drafter(drafter, self.directory, module.target.identity, self.extra | {"training": training})

    def _decode(self, trainer: Trainer, module: "DrafterModule", drafter: Drafter) -> AcceptanceCounts | None:
        counts = AcceptanceCounts(self.num_draft_tokens)
        training = drafter.training
        drafter.eval()
        # Autocast belongs to training: serving engines do not use it, so neither does the measurement.
        with torch.inference_mode(), torch.autocast(module.device.type, enabled=False):
            decoder = Decoder(module.target, drafter, self.num_draft_tokens, self.sampling)
            for index in range(trainer.global_rank, len(self.prompts), trainer.world_size):
                if self.stop():
                    break
                counts.add(decoder.generate(self.prompts[index], self.max_new_tokens, seed=index))
        drafter.train(training)
        if trainer.world_size > 1:
            stopped = not trainer.strategy.reduce_boolean_decision(not self.stop(), all=True)
            summed = trainer.strategy.reduce(_vector(counts).to(module.device), reduce_op="sum")
            counts = _from_vector(summed, self.num_draft_tokens)
        else:
            stopped = self.stop()
        return None if stopped else counts

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run must know: the best head and where it was."""
        return {"best": self.best, "best_step": self.best_step, "measured_step": self.measured_step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue; the directory of the best head itself is brought along by the caller."""
        self.best, self.best_step = state_dict["best"], state_dict["best_step"]
        self.measured_step = state_dict["measured_step"]


def _vector(counts: AcceptanceCounts) -> Tensor:
    lists = (counts.drafted_per_position, counts.reached_per_position, counts.accepted_per_position)
    scalars = [counts.rounds, counts.drafted, counts.accepted]
    return torch.tensor(scalars + [value for values in lists for value in values], dtype=torch.int64)


def _from_vector(vector: Tensor, num_draft_tokens: int) -> AcceptanceCounts:
    rounds, drafted, accepted, *rest = vector.tolist()
    lists = [rest[i : i + num_draft_tokens] for i in range(0, 3 * num_draft_tokens, num_draft_tokens)]
    return AcceptanceCounts(num_draft_tokens, rounds, drafted, accepted, *lists)
