"""What this process is doing, since when and for how long: a long step is not one that never ends."""

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from traceback import walk_stack
from types import FrameType

from torch import nn

SAVING = "the writing of a checkpoint"
_COLLECTIVES = ("torch/distributed/", "deepspeed/comm/")


class Stopwatch:
    """Seconds spent training; decoding and validation in between are left out."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._since: float | None = None

    def start(self) -> None:
        """Count from now on."""
        self._since = time.perf_counter()

    def pause(self) -> None:
        """Stop counting until the next ``start``."""
        if self._since is not None:
            self._seconds += time.perf_counter() - self._since
            self._since = None

    def lap(self) -> float:
        """Seconds counted since the last lap."""
        self.pause()
        self.start()
        seconds, self._seconds = self._seconds, 0.0
        return seconds


class Activity:
    """Progress of a training. ``beat`` notes it; a wait that ended is no fault, so the longest one is remembered."""

    def __init__(self, modules: dict[str, nn.Module]) -> None:
        self.modules = modules  # that a stack is searched for, by name
        self.phase = "between two steps"
        self.stopping = False  # whether the process was asked to end
        self.longest = 0.0  # seconds without a beat, of those that ended
        self._last = time.monotonic()

    def beat(self, phase: str | None = None) -> None:
        """Something was finished; ``phase`` is what begins."""
        now = time.monotonic()
        self.longest = max(self.longest, now - self._last)
        self._last = now
        self.phase = phase or self.phase

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """A phase of its own within another one."""
        before = self.phase
        self.beat(phase)
        try:
            yield
        finally:
            self.beat(before)

    def stalled(self) -> float:
        """Seconds since the last beat."""
        return time.monotonic() - self._last

    def where(self) -> str:
        """The phase, the collective or else the function that the main thread is in, and the module around it."""
        frames = sys._current_frames()
        main, own = threading.main_thread().ident, threading.get_ident()
        # On a GPU the backward pass runs in threads of autograd's, which come behind the main one.
        threads = sorted((ident for ident in frames if ident == main or ident != own), key=lambda ident: ident != main)
        stacks = [[frame for frame, _ in walk_stack(frames[ident])] for ident in threads]  # innermost first
        collective = next((frame for stack in stacks for frame in stack if _is_collective(frame)), None)
        stack = next((stack for stack in stacks if collective is None or collective in stack), [])
        place, words = collective or next(iter(stack), None), []
        if place is not None:
            file = "/".join(Path(place.f_code.co_filename).parts[-3:])
            words.append(f"in {place.f_code.co_name} ({file}:{place.f_lineno})")
        names = {
            id(part): f"{root}.{name}".rstrip(".")
            for root, of in self.modules.items()
            for name, part in of.named_modules()
        }
        selves = (frame.f_locals.get("self") for frame in stack if "self" in frame.f_code.co_varnames)
        words += [f"of {names[id(each)]}" for each in selves if id(each) in names][:1]
        return " ".join([*words, f"during {self.phase}"])


def _is_collective(frame: FrameType) -> bool:
    code = frame.f_code
    return any(part in code.co_filename for part in _COLLECTIVES) and code.co_name not in ("wrapper", "log_wrapper")
