"""Which rows a rank sees, in which order: seeded, the same for any number of ranks, able to continue mid-epoch."""

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import Sampler

from specdraft.errors import UserError


class ResumableSampler(Sampler[int]):
    """Row indices of one rank.

    The epoch's permutation depends on seed and epoch alone. It is cut into global batches of
    ``batch_size * world_size`` rows, of which each rank takes its part, so that two ranks see together what one rank
    with twice the batch size sees. Rows that do not fill a last global batch wait for another epoch's permutation.

    Lightning calls ``set_epoch``. ``__len__`` is always that of a whole epoch: a resumed Lightning loop subtracts the
    batches it has already seen.
    """

    def __init__(self, num_rows: int, batch_size: int, seed: int = 0, rank: int = 0, world_size: int = 1) -> None:
        """Raises UserError if there are fewer rows than one global batch takes."""
        self.num_rows, self.batch_size, self.seed = num_rows, batch_size, seed
        self.rank, self.world_size = rank, world_size
        self.epoch = 0
        self._resumed: tuple[int, int] | None = None  # (epoch, rows of it that are done)
        if num_rows < self.global_batch_size:
            raise UserError(
                f"the training data packs into {num_rows} rows, one batch takes {self.global_batch_size} "
                f"(data.batch_size={batch_size} on {world_size} devices): lower data.batch_size or use more data"
            )

    @property
    def global_batch_size(self) -> int:
        """Rows that all ranks consume in one step."""
        return self.batch_size * self.world_size

    @property
    def rows_per_epoch(self) -> int:
        """Rows that all ranks consume in an epoch."""
        return self.num_rows // self.global_batch_size * self.global_batch_size

    def __len__(self) -> int:
        """Rows of this rank in a whole epoch."""
        return self.rows_per_epoch // self.world_size

    def __iter__(self) -> Iterator[int]:
        """The rows of this rank that are left in the epoch."""
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + self.epoch)
        order = torch.randperm(self.num_rows, generator=generator)
        done = 0
        if self._resumed is not None and self._resumed[0] == self.epoch:
            done = self._resumed[1]
        for start in range(done, self.rows_per_epoch - self.global_batch_size + 1, self.global_batch_size):
            mine = start + self.rank * self.batch_size
            yield from order[mine : mine + self.batch_size].tolist()

    def set_epoch(self, epoch: int) -> None:
        """Choose the permutation."""
        self.epoch = epoch

    def state_dict(self, epoch: int, batches: int) -> dict[str, Any]:
        """What a resumed run needs to know once ``batches`` of ``epoch`` are done: the same on every rank."""
        return {
            "epoch": epoch,
            "rows": batches * self.global_batch_size,
            "num_rows": self.num_rows,
            "seed": self.seed,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue there. Raises UserError if the order of rows was another one."""
        for name in ("num_rows", "seed"):
            if state[name] != getattr(self, name):
                raise UserError(
                    f"the checkpoint was trained on other data ({name} was {state[name]}, now {getattr(self, name)}): "
                    "resume with the settings of that run, or start anew"
                )
        epoch, rows = state["epoch"], state["rows"]
        if rows >= self.rows_per_epoch:
            epoch, rows = epoch + 1, 0
        self.epoch = epoch
        self._resumed = (epoch, rows)
