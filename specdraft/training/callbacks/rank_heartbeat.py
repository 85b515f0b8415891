"""Notices that another rank is gone, or that all are stuck, where a collective would wait for half an hour.

Each rank counts up a number in the store that the ranks met at, and says there for how long it has made no progress.
The first rank watches all others, and they watch it: a rank that does not count any more was killed, hangs, or lost its
machine or its network. Ranks that count but make no progress wait for each other in different collectives."""

import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import cast

import torch
from lightning import Callback, LightningModule, Trainer
from torch.distributed import DistError, PrefixStore, Store
from torch.distributed.distributed_c10d import _get_default_store

from specdraft.entry import INTERRUPTED
from specdraft.errors import UserError
from specdraft.training.activity import Activity
from specdraft.training.checkpoints.resume import LAST
from specdraft.training.module import DrafterModule

_STUCK = "stuck"  # the store has this key once the first rank has said that all are
_GONE = "it was killed, hangs, or has lost its machine or network (its own output may say why); the other ranks stop"


class RankHeartbeat(Callback):
    """Ends this process, with a sentence, once another rank is silent, or no rank makes progress."""

    def __init__(self, checkpoints: str | Path, silence: float = 30.0, patience: float = 600.0) -> None:
        """``checkpoints``: where the run resumes from. ``silence``: seconds without a count of another rank.
        ``patience``: seconds in which no rank makes progress, beyond the longest time that it took before."""
        self.checkpoints = Path(checkpoints)
        self.silence, self.patience = silence, patience
        self._ended = threading.Event()
        self._heard: dict[int, tuple[int, float]] = {}
        self._told = False  # whether the first rank has said that all are stuck
        self._activity: Activity

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin to count and to watch."""
        if trainer.world_size > 1:
            connection = _get_default_store().clone()  # type: ignore[attr-defined]  # for a thread of its own
            store = PrefixStore("specdraft-peers", connection)
            peers = range(1, trainer.world_size) if trainer.is_global_zero else range(1)
            self._activity = cast(DrafterModule, pl_module).activity
            self._ended.clear()
            self._heard = dict.fromkeys(peers, (0, time.monotonic()))  # what each has counted, and since when
            threading.Thread(target=self._count, args=(store, trainer.global_rank), daemon=True).start()
            threading.Thread(target=self._watch, daemon=True).start()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """From here on ranks may take different ways."""
        trainer.strategy.barrier()
        self._ended.set()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Count no more: if the others have not ended as well, they are to notice."""
        self._ended.set()
        if self._told:  # the exception is that the first rank has left
            os._exit(2)
        if _is_broken_connection(exception) and trainer.world_size > 1 and self._activity.stopping:
            os._exit(INTERRUPTED)  # as the other rank did

    def _count(self, store: Store, rank: int) -> None:
        while not self._ended.wait(0.05 if self._told else self.silence / 10):
            try:
                self._tell_and_hear(store, rank)
            except (DistError, RuntimeError):
                if self._told:
                    os._exit(2)
                self._leave(f"rank {rank} does not reach the store of the first rank any more: {_GONE}")

    def _tell_and_hear(self, store: Store, rank: int) -> None:
        stalled = self._activity.stalled() > self.patience + self._activity.longest
        store.set(f"stalled/{rank}", self._activity.where() if stalled else "")
        store.add(f"beat/{rank}", 1)
        for peer, (before, _) in list(self._heard.items()):
            count = store.add(f"beat/{peer}", 0)
            if count != before:
                self._heard[peer] = count, time.monotonic()
        if rank:
            self._told = self._told or store.check([_STUCK])
        elif stalled:
            places = [store.get(f"stalled/{each}").decode() for each in range(1 + len(self._heard))]
            if all(places):
                self._end_stuck(store, places)

    def _end_stuck(self, store: Store, places: list[str]) -> None:
        ranks: dict[str, list[str]] = {}
        for rank, place in enumerate(places):
            ranks.setdefault(place, []).append(str(rank))
        said = "; ".join(f"rank {', '.join(numbers)} is {place}" for place, numbers in ranks.items())
        self._leave(
            f"no rank has made progress for {self._activity.stalled():.0f} seconds: {said}: they wait for each other, "
            "as when a drafter or a callback does not call the same modules and collectives on every rank",
            store,
        )

    def _watch(self) -> None:
        # A thread of its own: the store of a first rank that hangs does not answer the other one.
        while not self._ended.wait(self.silence / 10):
            now = time.monotonic()
            for peer, (_, last) in list(self._heard.items()):
                if now - last > self.silence:
                    self._leave(f"rank {peer} has not been heard of for {self.silence:.0f} seconds: {_GONE}")

    def _leave(self, sentence: str, stuck: Store | None = None) -> None:
        """End the process: its main thread waits in a collective, out of reach of an exception. ``stuck``: the store
        that tells the other ranks to leave without a sentence of their own, after this one."""
        if self._ended.is_set():
            return
        if self._activity.stopping:  # the others have ended because they were told to, as this one was
            os._exit(INTERRUPTED)
        print(f"error: {sentence}; {_resume(self.checkpoints)}", file=sys.stderr, flush=True)
        if stuck is not None:
            stuck.set(_STUCK, "")
            time.sleep(max(1.0, 0.3 * self.silence))
        os._exit(2)


def _resume(checkpoints: Path) -> str:
    return f"resume from {checkpoints / LAST}, on any number of ranks, or with resume=auto"


def _is_broken_connection(error: BaseException) -> bool:
    broken = isinstance(error, DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error))
    return broken and torch.distributed.is_initialized()


@contextmanager
def broken_connections_explained(checkpoints: Path) -> Iterator[None]:
    """A connection to another rank that breaks becomes a UserError."""
    try:
        yield
    except RuntimeError as error:
        if not _is_broken_connection(error):
            raise
        what = f"rank {torch.distributed.get_rank()} has lost its connection to another one: {_GONE}"
        raise UserError(f"{what}; {_resume(checkpoints)}") from error
