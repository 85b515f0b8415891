"""Batches are read while others are trained on, so that a step costs the larger of the two and not their sum."""

from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from threading import Event

import torch
from torch.utils.data import DataLoader

from specdraft.targets.batch import Batch


class ReadAhead:
    """A loader's batches, in its order, which a thread reads before they are asked for: at most ``depth`` of them, and
    none once ``close`` was called. What fails there is raised where its batch would come."""

    def __init__(
        self,
        loader: DataLoader[Batch],
        depth: int,
        read: Callable[[Batch], Batch] = lambda batch: batch,
        hang_up: Callable[[], object] = lambda: None,
        pinned: bool = False,
    ) -> None:
        """``read`` is done to each batch by the thread; ``hang_up`` ends it, and that of every other loader.
        ``pinned``: the batches go to a GPU."""
        self.loader, self.depth, self.read, self.hang_up, self.pinned = loader, depth, read, hang_up, pinned
        self.batch_sampler = loader.batch_sampler  # Lightning tells its sampler the epoch, and DeepSpeed asks its size
        self._running: Generator[Batch] | None = None
        self._hurries = Event()

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Batch]:
        if self._running is not None:
            self._running.close()  # which was not read to its end
        self._hurries = Event()
        # Nothing of it refers to this object, so that a loader that is given up takes its thread along at once.
        self._running = _batches(iter(self.loader), self.depth, self.read, self.hang_up, self.pinned, self._hurries)
        return self._running

    def close(self) -> None:
        """End the thread, whatever it waits for, and the loader's workers."""
        self._hurries.set()
        if self._running is not None:
            self._running.close()
        self._running = self.loader._iterator = None


def _batches(
    batches: Iterator[Batch],
    depth: int,
    read: Callable[[Batch], Batch],
    hang_up: Callable[[], object],
    pinned: bool,
    hurries: Event,
) -> Generator[Batch]:
    """``batches``, read by a thread that lives as long as this generator. ``hurries``: hang up on a read under way."""
    ended = Event()

    def make() -> Batch | None:
        batch = None if ended.is_set() else next(batches, None)
        if batch is None or ended.is_set():
            ended.set()
            return None
        batch = read(batch)
        return batch.pin_memory() if pinned else batch

    with ThreadPoolExecutor(1, "read-ahead", _begin, (pinned and torch.cuda.current_device(),)) as thread:
        ahead = deque(thread.submit(make) for _ in range(depth))
        try:
            while (batch := ahead[0].result()) is not None:
                ahead.popleft()
                ahead.append(thread.submit(make))
                yield batch
        except (Exception, KeyboardInterrupt):
            hurries.set()
            raise
        finally:
            ended.set()
            while wait(ahead, 0.05).not_done:
                if hurries.is_set():  # again and again, as it may have begun to wait just now
                    hang_up()


def _begin(device: int | bool) -> None:
    torch.set_num_threads(1)  # of this thread: copies that took all cores would take them from the training
    if device is not False:
        torch.cuda.set_device(device)
