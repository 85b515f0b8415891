"""The LightningModule: one frozen target, one drafter, counted metrics.

B = batch, T = tokens.

The drafter is the only registered submodule. The target is kept outside: no gradient, no optimizer state, no
checkpoint, no strategy ever sees it (a registered frozen target is saved again with every ZeRO-2 checkpoint)."""

import dataclasses
import json
import math
from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from lightning import LightningModule, Trainer
from lightning.pytorch.strategies import DeepSpeedStrategy
from torch import Tensor

from specdraft.drafters.base import Drafter
from specdraft.drafters.vocabulary import DraftVocabulary
from specdraft.errors import UserError
from specdraft.targets import Target
from specdraft.targets.batch import Batch
from specdraft.text import fingerprint
from specdraft.training.activity import Activity, Stopwatch
from specdraft.training.boosting import Earlier
from specdraft.training.global_batch import step_totals
from specdraft.training.monitoring.metrics import Counts, gradient_norm, memory, peak_flops, ratios
from specdraft.training.schedule import OptimizerSettings
from specdraft.training.strategies import offloads_optimizer

T = TypeVar("T")


def log_interval(trainer: Trainer) -> int:
    """Optimizer steps between two logged lines."""
    return max(1, trainer.log_every_n_steps)  # type: ignore[attr-defined]  # set by Lightning's logger connector


class DrafterModule(LightningModule):
    """Trains ``drafter`` on the hidden states of ``target``.
    ``describe`` is saved with every checkpoint as plain containers: a DictConfig would break ``torch.load``.
    ``flops_per_token`` is the arithmetic of a step, for the share of the devices' peak that is used; ``about`` goes
    into the ``extra`` of the drafters that are saved. ``earlier``: whose hits it does not learn."""

    def __init__(
        self,
        drafter: Drafter,
        target: Target,
        optimizer: OptimizerSettings,
        describe: dict[str, Any] | None = None,
        flops_per_token: float | None = None,
        about: dict[str, Any] | None = None,
        earlier: Earlier | None = None,
    ) -> None:
        super().__init__()
        self.drafter = drafter
        self.target: Target
        object.__setattr__(self, "target", target)
        self.settings, self.earlier = optimizer, earlier
        self.save_hyperparameters({"run": describe or {}}, logger=False)  # loggers get it flat: log_identity
        self.stopwatch, self.waiting = Stopwatch(), Stopwatch()
        self.activity = Activity({"drafter": drafter, "target": target.model})
        self.flops_per_token = flops_per_token
        self.about = about or {}
        self.first_values: dict[str, float] = {}
        self.last_values: dict[str, float] = {}
        self.tokens, self.seconds = 0.0, 0.0  # of the logged steps
        self.step_batches: list[tuple[int, Batch, Tensor]] = []  # number, tokens and loss of those of this step
        self._step_counts: list[dict[str, Tensor]] = []
        self._totals: Sequence[float] | None = None
        self._training, self._validation = Counts(), Counts()
        self._step_values: dict[str, float] = {}
        self._logged_step = 0
        self._seed = torch.initial_seed()

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Loss of one packed batch."""
        torch.manual_seed(self._place(batch_idx))  # for layers that draw by themselves, such as dropout
        generator = torch.Generator(self.device).manual_seed(self._place(batch_idx))
        loss, metrics = self._loss(self.drafter.prepare(batch, generator), self._totals, generator)
        self.step_batches.append((batch_idx, batch, loss.detach()))
        self._step_counts.append(metrics)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """The same counts on held-out batches."""
        loss, metrics = self._loss(batch)
        if not torch.isfinite(loss):
            raise UserError(f"the validation loss is {loss.item()} in batch {batch_idx}: expected a finite number")
        self._validation.add(metrics)
        self.activity.beat()

    def _loss(
        self, batch: Batch, totals: Sequence[float] | None = None, generator: torch.Generator | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        with torch.no_grad():
            features = batch.features(self.target, self.drafter.layers, self.drafter.reads_every_last)
            if generator is not None:  # training
                batch = batch if self.earlier is None else self.earlier.missed(batch, features, self.target)
                features = self.drafter.augment(features, generator)
        more = () if totals is None else (totals,)
        result = self.drafter.training_loss(batch, features, self.target, *more)
        counts = {**result.metrics, "tokens_total": (batch.document_ids >= 0).sum()}
        # The loss is a mean over what the drafter counts, positions mostly; a batch without any weighs nothing.
        counted = self.drafter.count_supervised(batch) if totals is None else totals
        positions = counts.get("step_0/total", torch.zeros(()))
        if counted is not None:
            positions = result.loss.new_tensor(float(counted[0]))
        if isinstance(self.drafter, DraftVocabulary):
            missing = ~self.drafter.t2d[batch.input_ids]
            counts["out_of_vocabulary_tokens_sum"] = (missing & batch.loss_mask).sum()
            counts["out_of_vocabulary_tokens_total"] = batch.loss_mask.sum()
        return result.loss, counts | {"loss_sum": result.loss.detach() * positions, "loss_total": positions}

    def _place(self, batch_idx: int) -> int:
        # Of the run's seed and the batch's place alone, so that a resumed run draws the same with no state to restore.
        # Hashes of integers are the same in every process.
        return hash((self._seed, self.global_step, batch_idx, self.global_rank)) % 2**63

    def on_fit_start(self) -> None:
        """Bring the target to this rank's device."""
        self.target.to(self.device)
        self._hook = self.target.decoder.register_forward_hook(lambda *_: self.activity.beat())

    def on_fit_end(self) -> None:
        """Leave the target as it was."""
        self._hook.remove()

    def on_train_start(self) -> None:
        """Start the clocks; what a resumed run has done is logged already."""
        self._logged_step = self.trainer.global_step
        self._peak_flops = peak_flops(self.device, str(self.trainer.precision))
        self.stopwatch.start()
        self.waiting.start()
        self.activity.beat()

    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> None:
        """The batch is there: count the supervised positions of the optimizer step, if one begins with it."""
        self.waiting.pause()
        self.activity.beat(f"step {self.trainer.global_step + 1}")
        if batch_idx % self.trainer.accumulate_grad_batches == 0:
            self.drafter.progress = min(1.0, self.trainer.global_step / max(1, self.trainer.max_steps))
            self._totals = step_totals(self.trainer, self.drafter, batch, batch_idx)
            self.step_batches, self._step_counts = [], []

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Count the step; of one that will be logged, keep the learning rate and the gradient norm before clipping."""
        self.activity.beat()
        if not self.ends_step():
            return
        for counts in self._step_counts:
            self._training.add(counts)
        if (self.trainer.global_step + 1) % log_interval(self.trainer):
            return
        self._step_values["train/learning_rate"] = optimizer.param_groups[0]["lr"]
        gradients = [parameter.grad for parameter in self.drafter.parameters() if parameter.grad is not None]
        if gradients:  # DeepSpeed keeps them to itself
            self._step_values["train/grad_norm"] = gradient_norm(gradients)

    def ends_step(self) -> bool:
        """Whether the batch under way is the last of its optimizer step: DeepSpeed is asked for one after each."""
        return not self.trainer.fit_loop.epoch_loop._should_accumulate()

    def leave_out_step(self) -> None:
        """Of a step without an update nothing is counted."""
        self._step_counts = []

    def on_train_batch_end(self, outputs: Any, batch: Batch, batch_idx: int) -> None:
        """Log the counts of the last ``log_every_n_steps`` steps, reduced over ranks; then wait for the next batch."""
        self._log_steps()
        self.waiting.start()
        self.activity.beat("the wait for a batch")

    def _log_steps(self) -> None:
        step = self.trainer.global_step
        if step % log_interval(self.trainer) or step == self._logged_step:
            return
        steps, self._logged_step = step - self._logged_step, step
        counts = self._training.take(self.gather)
        if not counts:  # every step was left out
            return
        values = {f"train/{name}": value for name, value in ratios(counts).items()}
        seconds = self.stopwatch.lap()
        self.tokens, self.seconds = self.tokens + counts["tokens_total"], self.seconds + seconds
        rate = values["train/tokens_per_second"] = counts["tokens_total"] / seconds
        values["train/tokens_per_step"] = counts["tokens_total"] / steps
        if self.flops_per_token is not None and self._peak_flops is not None:
            peak = self._peak_flops * self.trainer.world_size
            values["train/peak_flops_share"] = rate * self.flops_per_token / peak
        # Of the rank that has it worst: that one decides.
        gauges = self.gather({"data_wait_share": self.waiting.lap() / seconds} | memory(self.device))
        values |= {f"train/{name}": max(rank[name] for rank in gauges) for name in gauges[0]}
        values |= self._step_values
        engine = getattr(self.trainer.strategy, "deepspeed_engine", None)
        if engine is not None and engine.get_global_grad_norm() is not None:
            values["train/grad_norm"] = float(engine.get_global_grad_norm())
        self.publish(values)

    def on_validation_start(self) -> None:
        """Validation is not training time."""
        self.activity.beat("the validation")
        self.stopwatch.pause()
        self.waiting.pause()

    def on_validation_epoch_end(self) -> None:
        """Log the counts of the whole validation split; a check before training may have seen a part of it alone."""
        counts = self._validation.take(self.gather)
        if self.trainer.sanity_checking and self.trainer.num_sanity_val_steps != math.inf:
            return
        self.publish({f"validation/{name}": value for name, value in ratios(counts).items()})

    def on_validation_end(self) -> None:
        """Training time counts again."""
        self.stopwatch.start()
        self.waiting.start()

    def publish(self, values: dict[str, float]) -> None:
        """Send values to every logger, at the number of optimizer steps done, and to callbacks and progress bar.
        Lightning's own forwarding drops what is logged between two multiples of ``log_every_n_steps``."""
        self.first_values = values | self.first_values
        self.last_values |= values
        self.log_dict(values, logger=False, batch_size=1)
        for logger in self.trainer.loggers:
            logger.log_metrics(values, step=self.trainer.global_step)

    def gather(self, values: T) -> list[T]:
        """The values of every rank. Every rank must call it."""
        if self.trainer.world_size == 1:
            return [values]
        everywhere: list[Any] = [None] * self.trainer.world_size
        torch.distributed.all_gather_object(everywhere, values)
        return everywhere

    def configure_optimizers(self) -> Any:
        """The optimizer and its schedule over ``trainer.max_steps``."""
        max_steps, strategy = self.trainer.max_steps, self.trainer.strategy
        plain = not isinstance(strategy, DeepSpeedStrategy)
        optimizer = self.settings.build(self.drafter, plain, offloads_optimizer(strategy))
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: self.settings.ratio(step, max_steps))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Note what the weights belong to."""
        checkpoint["specdraft"] = self._belonging()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Raises UserError if the checkpoint was trained for another target, architecture or draft vocabulary: one that
        drifts on resume keeps the loss curve and ruins acceptance."""
        saved, ours = checkpoint.get("specdraft", {}), self._belonging()
        for key, value in ours.items():
            if saved.get(key) != value:
                what = f"cannot resume: {key} is {saved.get(key)} in the checkpoint and {value} in this run"
                raise UserError(f"{what}; resume with the settings of that run, or start again without resume=")

    def _belonging(self) -> dict[str, Any]:
        """Plain values only: DeepSpeed and ``torch.load(weights_only=True)`` both read them back."""
        buffers = dict(self.drafter.named_buffers())
        vocabulary = [buffers[name].cpu().numpy().tobytes() for name in ("d2t", "t2d") if name in buffers]
        identity = dataclasses.asdict(self.target.identity)
        # Flat, so that the first difference can be named in a sentence.
        return {
            # Its hashes tell one target from another, wherever its directory lies now.
            **{f"target {key}": value for key, value in identity.items() if key != "name"},
            **{f"drafter {key}": value for key, value in json.loads(json.dumps(self.drafter.config())).items()},
            "draft vocabulary hash": fingerprint(b"".join(vocabulary)),
        }
