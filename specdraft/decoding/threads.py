"""How many threads a decoding pass is given on a CPU.

Its products are so short that waking threads which wait may take longer than they help: on two virtual cores a pass of
the embedded target takes 8.8 ms on both, 6.7 ms on one. Model and machine decide which is faster: it is measured. Where
not all threads win, another process may have had a core for a moment, which would hold for the whole of a long run: so
it is measured again a little later, and the best time of each number counts."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

FEW_TOKENS = 32  # of all requests together: what is measured holds for passes of so many at most
_ROUNDS = 3
_LOOKS, _PAUSE = 3, 1.0  # how often it is measured at most, and the seconds between
_LONG = 0.25  # seconds after which a pass profits from every thread, and measuring would take long


def fastest(run: Callable[[], object]) -> int:
    """The number of threads (1, 2, 4, ... or all that torch has) with which ``run`` takes the shortest time."""
    most = torch.get_num_threads()
    choices = [*(2**power for power in range(most.bit_length()) if 2**power < most), most]
    if len(choices) == 1:
        return most
    run()  # the first call of each shape prepares things
    seconds: dict[int, list[float]] = {threads: [] for threads in choices}
    for look in range(_LOOKS):
        time.sleep(_PAUSE if look else 0)
        for threads in choices * _ROUNDS:
            started = time.perf_counter()
            with limited(threads):
                run()
            seconds[threads].append(time.perf_counter() - started)
            if seconds[threads][-1] > _LONG:
                return most
        best = min(choices, key=lambda threads: min(seconds[threads]))
        if best == most:
            break
    return best


@contextmanager
def limited(threads: int | None) -> Iterator[None]:
    """Inside, torch computes on so many threads; None: on as many as before."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
