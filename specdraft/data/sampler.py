"""Which sequences a rank sees, in which order: seeded, the same for any number of ranks, able to resume mid-epoch."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import Sampler

from specdraft.errors import UserError
from specdraft.text import counted


class ResumableSampler(Sampler[int]):
    """Indices of the packed sequences of one rank.

    The epoch's permutation depends on seed and epoch alone. Each rank takes its part of each global batch of
    ``batch_size * world_size`` sequences, so that two ranks see together what one rank with twice the batch size sees;
    ``accumulate`` consecutive ones make an optimizer step. Sequences that do not fill a last step wait for another
    epoch's permutation. Lightning calls ``set_epoch``."""

    def __init__(
        self,
        num_sequences: int,
        batch_size: int,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
        accumulate: int = 1,
        steps_left: Callable[[], int | None] = lambda: None,
    ) -> None:
        """``steps_left`` says how many optimizer steps there will be yet, None if nobody knows.
        Raises UserError if there are fewer sequences than one optimizer step takes."""
        self.num_sequences, self.batch_size, self.seed = num_sequences, batch_size, seed
        self.rank, self.world_size, self.accumulate = rank, world_size, accumulate
        self.steps_left = steps_left
        self.epoch = 0
        self._resumed: tuple[int, int] | None = None  # (epoch, sequences of it that are done)
        self._order: tuple[int, torch.Tensor] | None = None  # (epoch, its permutation)
        # Sequences that all ranks consume at a time, in a step, and in an epoch.
        self.global_batch_size = batch_size * world_size
        self.step_sequences = self.global_batch_size * accumulate
        self.sequences_per_epoch = num_sequences // self.step_sequences * self.step_sequences
        if not self.sequences_per_epoch:
            batches = f", {accumulate} batches accumulated" if accumulate > 1 else ""
            packed = f"the training data packs into {counted(num_sequences, 'sequence')}"
            raise UserError(
                f"{packed}, one step takes {self.step_sequences} "
                f"(data.batch_size={batch_size} on {counted(world_size, 'device')}{batches}): lower it or use more data"
            )

    def __len__(self) -> int:
        """Sequences of this rank in a whole epoch: a resumed Lightning loop subtracts the batches it has seen."""
        return self.sequences_per_epoch // self.world_size

    def __iter__(self) -> Iterator[int]:
        resumed, sequences = self._resumed or (-1, 0)
        done, left = sequences if resumed == self.epoch else 0, self.steps_left()
        end = self.sequences_per_epoch  # what lies behind the last step is not read ahead either
        end = end if left is None else min(end, done + left * self.step_sequences)
        for start in range(done, end - self.global_batch_size + 1, self.global_batch_size):
            yield from self._mine(start)

    def step_indices(self, batch: int) -> list[int]:
        """The sequences of this rank in the optimizer step that begins with the epoch's batch number ``batch``."""
        first, size = batch * self.global_batch_size, self.global_batch_size
        return [index for part in range(self.accumulate) for index in self._mine(first + part * size)]

    def _mine(self, start: int) -> list[int]:
        """This rank's part of the global batch that begins at ``start`` of the epoch."""
        if self._order is None or self._order[0] != self.epoch:
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + self.epoch)
            self._order = self.epoch, torch.randperm(self.num_sequences, generator=generator)
        mine = start + self.rank * self.batch_size
        return self._order[1][mine : mine + self.batch_size].tolist()

    def set_epoch(self, epoch: int) -> None:
        """Choose the permutation."""
        self.epoch = epoch

    def state_dict(self, epoch: int, batches: int) -> dict[str, Any]:
        """What a resumed run needs to know once ``batches`` of ``epoch`` are done: the same on every rank."""
        return {
            "epoch": epoch,
            "sequences": batches * self.global_batch_size,
            "num_sequences": self.num_sequences,
            "seed": self.seed,
            "step_sequences": self.step_sequences,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue there, on any number of ranks. Raises UserError if the order was another one, or a step took
        another number of sequences."""
        for name in ("num_sequences", "seed"):
            if state[name] != getattr(self, name):
                said = f"the checkpoint was trained on other data ({name} was {state[name]}, now {getattr(self, name)})"
                raise UserError(f"{said}: resume with the settings of that run, or start a new one")
        if (before := state["step_sequences"]) != self.step_sequences:
            raise UserError(
                f"an optimizer step of the checkpoint takes {before} sequences, one of this run {self.step_sequences}: "
                f"expected data.batch_size ({self.batch_size}) x devices ({self.world_size}) x "
                f"trainer.accumulate_grad_batches ({self.accumulate}) to be {before}; change one of them"
            )
        self.epoch, done = state["epoch"], state["sequences"]
        if done >= self.sequences_per_epoch:
            self.epoch, done = self.epoch + 1, 0
        self._resumed = (self.epoch, done)
