"""Gloo's threads, which are busy for a moment longer than the collective that they ran."""

import time
from pathlib import Path

_NAME = "pt_gloo_runloop"  # what torch calls them


def wait_for_gloo(seconds: float = 5.0) -> None:
    """Return once no thread of gloo runs, at the latest after ``seconds``; on other systems than Linux at once.
    Such a thread gives tensors back after the collective has returned, which needs Python: one that a busy machine held
    up until Python had ended aborts the process (pytorch/pytorch#179291), and whoever launched the ranks takes that for
    a failure and ends the others."""
    deadline, quiet = time.monotonic() + seconds, 0
    while quiet < 2 and time.monotonic() < deadline:  # twice: one that waited for this thread's Python runs after it
        time.sleep(0.02)
        quiet = 0 if any(state in "RD" for state in gloo_threads()) else quiet + 1


def gloo_threads() -> list[str]:
    """The state of each, as in ``/proc``: R runs or is ready to, D waits for a device, S sleeps."""
    states = []
    for file in Path("/proc/self/task").glob("*/stat"):
        try:
            before, _, after = file.read_text().rpartition(")")  # NUMBER (NAME) STATE ...
        except OSError:  # it has ended meanwhile
            continue
        if before.partition("(")[2] == _NAME:
            states.append(after.split()[0])
    return states
