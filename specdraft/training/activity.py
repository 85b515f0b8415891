"""What this process is doing, since when and for how long: a long step is not one that never ends."""

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

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
        """``modules`` are those that a stack is searched for, by name."""
        self.modules = modules
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
        main = threading.main_thread().ident
        frames = sys._current_frames()
        stacks = [list(_stack(frames[main]))] if main in frames else []
        # On a GPU the backward pass runs in threads of autograd's.
        stacks += [list(_stack(frame)) for ident, frame in frames.items() if ident not in (main, threading.get_ident())]
        collective = next((frame for stack in stacks for frame in stack if _is_collective(frame)), None)
        stack = next((stack for stack in stacks if collective is None or collective in stack), [])
        names = {id(part): name for root, of in self.modules.items() for name, part in _named(root, of)}
        selves = (frame.f_locals.get("self") for frame in stack if "self" in frame.f_code.co_varnames)
        module = next((names[id(each)] for each in selves if id(each) in names), None)
        place = collective or (stack[0] if stack else None)
        parts = [f"in {place.f_code.co_name} ({_file(place)}:{place.f_lineno})" if place else "", f"of {module}"]
        return " ".join(part for part in (*parts[: 1 + (module is not None)], f"during {self.phase}") if part)


def _stack(frame: FrameType | None) -> Iterator[FrameType]:
    """Innermost first."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def _named(root: str, module: nn.Module) -> Iterator[tuple[str, Any]]:
    for name, part in module.named_modules():
        yield f"{root}.{name}" if name else root, part


def _is_collective(frame: FrameType) -> bool:
    code = frame.f_code
    return any(part in code.co_filename for part in _COLLECTIVES) and code.co_name not in ("wrapper", "log_wrapper")


def _file(frame: FrameType) -> str:
    return "/".join(Path(frame.f_code.co_filename).parts[-3:])
