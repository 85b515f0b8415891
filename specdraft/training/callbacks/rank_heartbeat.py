"""Notices that another rank is gone, where a collective would wait for it for half an hour.

Each rank counts up a number in the store that the ranks met at. The first rank watches all others, and they watch it:
a rank that does not count any more was killed, hangs, or lost its machine or its network.
"""

import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from lightning import Callback, LightningModule, Trainer
from torch.distributed import DistError, PrefixStore, Store
from torch.distributed.distributed_c10d import _get_default_store

from specdraft.errors import UserError
from specdraft.training.checkpoints.resume import LAST

SILENCE = 30.0  # seconds


class RankHeartbeat(Callback):
    """Ends this process, with a sentence, once another rank has been silent for ``silence`` seconds of training."""

    def __init__(self, checkpoints: Path, silence: float = SILENCE) -> None:
        """``checkpoints`` is named in the sentence: the run resumes from there."""
        self.checkpoints = checkpoints
        self.silence = silence
        self._ended = threading.Event()
        self._heard: dict[int, tuple[int, float]] = {}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin to count and to watch."""
        if trainer.world_size > 1:
            connection = _get_default_store().clone()  # type: ignore[attr-defined]  # for a thread of its own
            store = PrefixStore("specdraft-peers", connection)
            peers = range(1, trainer.world_size) if trainer.is_global_zero else range(1)
            self._ended.clear()
            self._heard = dict.fromkeys(peers, (0, time.monotonic()))  # what each has counted, and since when
            threading.Thread(target=self._count, args=(store, trainer.global_rank), daemon=True).start()
            threading.Thread(target=self._watch, daemon=True).start()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """From here on ranks may take different ways."""
        if trainer.world_size > 1:
            trainer.strategy.barrier()
        self._ended.set()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Count no more: if the others have not ended as well, they are to notice."""
        self._ended.set()

    def _count(self, store: Store, rank: int) -> None:
        while not self._ended.wait(self.silence / 10):
            try:
                store.add(f"beat/{rank}", 1)
                for peer, (before, _) in list(self._heard.items()):
                    count = store.add(f"beat/{peer}", 0)
                    if count != before:
                        self._heard[peer] = count, time.monotonic()
            except (DistError, RuntimeError):
                self._leave(f"rank {rank} does not reach the store of the first rank any more")

    def _watch(self) -> None:
        # A thread of its own: the store of a first rank that hangs does not answer the other one.
        while not self._ended.wait(self.silence / 10):
            now = time.monotonic()
            for peer, (_, last) in list(self._heard.items()):
                if now - last > self.silence:
                    self._leave(f"rank {peer} has not been heard of for {self.silence:.0f} seconds")

    def _leave(self, what: str) -> None:
        if not self._ended.is_set():
            # The main thread waits in a collective, out of reach of an exception.
            print(f"error: {what}: {advice(self.checkpoints)}", file=sys.stderr, flush=True)
            os._exit(2)


def advice(checkpoints: Path) -> str:
    """How to go on where a rank is gone."""
    return (
        "it was killed, hangs, or has lost its machine or network (its own output may say why); the other ranks stop; "
        f"resume from {checkpoints / LAST}, on any number of ranks, or with resume=auto"
    )


@contextmanager
def broken_connections_explained(checkpoints: Path) -> Iterator[None]:
    """A connection to another rank that breaks becomes a UserError."""
    try:
        yield
    except RuntimeError as error:
        broken = isinstance(error, DistError) or "gloo" in str(error)
        if not broken or not torch.distributed.is_initialized():
            raise
        raise UserError(
            f"rank {torch.distributed.get_rank()} has lost its connection to another one: {advice(checkpoints)}"
        ) from error
