"""How many threads a decoding pass is given on a CPU.

Its products are so short that waking threads which wait may take longer than they help: on two virtual cores a pass of
the embedded target takes 8.8 ms on both, 6.7 ms on one. Model and machine decide which is faster: it is measured."""

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

FEW_TOKENS = 32  # of all requests together: what is measured holds for passes of so many at most
_ROUNDS = 3
_LONG = 0.25  # seconds after which a pass profits from every thread, and measuring would take long


def fastest(run: Callable[[], object]) -> int:
    """The number of threads (1, 2, 4, ... or all that torch has) with which ``run`` takes the shortest time."""
    most = torch.get_num_threads()
    choices = [*(2**power for power in range(most.bit_length()) if 2**power < most), most]
    if len(choices) == 1:
        return most
    run()  # the first call of each shape prepares things
    seconds: dict[int, list[float]] = {threads: [] for threads in choices}
    for _ in range(_ROUNDS):
        for threads, spent in seconds.items():
            started = time.perf_counter()
            with limited(threads):
                run()
            spent.append(time.perf_counter() - started)
            if spent[-1] > _LONG:
                return most
    return min(choices, key=lambda threads: statistics.median(seconds[threads]))


@contextmanager
def limited(threads: int | None) -> Iterator[None]:
    """Inside, torch computes on so many threads; None: on as many as before."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
