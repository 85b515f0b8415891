"""The loss of an optimizer step is a mean over the supervised positions of all ranks and of all accumulated batches.

A mean of each batch's mean would weigh a position more where its batch has few of them, and another number of ranks or
of accumulated batches would train another drafter. Which positions a step has is known before it begins: each rank
counts its own, and one sum of S numbers over the ranks gives the totals."""

import torch
from lightning import Trainer

from specdraft.data.datamodule import DataModule
from specdraft.drafters.base import Drafter
from specdraft.targets.batch import Batch


def step_totals(trainer: Trainer, drafter: Drafter, batch: Batch, batch_idx: int) -> tuple[float, ...] | None:
    """What every batch of the step that begins with ``batch`` divides its S sums over positions by.
    That is the step's positions over its number of batches on all ranks: strategies average gradients over ranks,
    Lightning divides the loss by the accumulated batches, and what is left is the sum over the step divided by its
    positions. Every rank must call it. None where the drafter counts none, or the data is not of our module."""
    data = trainer.datamodule  # type: ignore[attr-defined]  # set by Lightning's data connector
    if not isinstance(data, DataModule):
        return None
    step = data.step_batch(batch_idx)
    counts = drafter.count_supervised(step)
    if counts is None:
        return None
    if not torch.equal(step.input_ids[: len(batch.input_ids)], batch.input_ids.cpu()):
        raise RuntimeError(f"batch {batch_idx} of the epoch is not where the sampler has it: nothing is known of it")
    positions = counts.double().to(trainer.strategy.root_device)
    if trainer.world_size > 1:
        positions = trainer.strategy.reduce(positions, reduce_op="sum")
    return tuple((positions / (trainer.world_size * trainer.accumulate_grad_batches)).tolist())
