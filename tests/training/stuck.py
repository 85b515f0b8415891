"""A callback for ``imports=[stuck]``: from the third step on the ranks wait in different collectives."""

from typing import Any

import torch
from lightning import Callback, Trainer


class Stuck(Callback):
    """Rank 0 waits for a broadcast, the other one for a sum."""

    def on_train_start(self, *_: Any) -> None:
        self.other = torch.distributed.new_group()

    def on_before_zero_grad(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step == 2:
            print(f"rank {trainer.global_rank} gets stuck", flush=True)
            if trainer.global_rank:
                torch.distributed.all_reduce(torch.zeros(1), group=self.other)
            else:
                torch.distributed.broadcast(torch.zeros(1), 1)
