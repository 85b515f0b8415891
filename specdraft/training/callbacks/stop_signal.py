"""Ctrl-C and SIGTERM end a training with a checkpoint, or, where its step never ends, without."""

import math
import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any, cast

from lightning import Callback, LightningModule, Trainer

from specdraft.entry import INTERRUPTED
from specdraft.training.activity import SAVING, Activity
from specdraft.training.module import DrafterModule

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_UNWINDING = 5.0  # seconds in which the second signal's exception must have ended the process
_SAVING_SECONDS = 600.0  # that a checkpoint may take


class Interrupted(Exception):
    """Training was asked to stop; ``checkpoint`` resumes it."""

    def __init__(self, checkpoint: Path, step: int) -> None:
        super().__init__(f"stopped after step {step}; {checkpoint} resumes it")


class StopSignal(Callback):
    """Turns the first SIGINT or SIGTERM into a request, which is met at the end of the step; a second interrupts.
    Python runs signal handlers in the main thread alone, which may wait in a collective for ever: a thread, which
    hears of signals by a wakeup file descriptor, then ends the process."""

    def __init__(self, grace: float = 30.0) -> None:
        """``grace``: seconds that training may stand still after the request, beyond the longest time it ever did."""
        self.grace = grace
        self.requested = False
        self._previous: dict[int, Any] = {}
        self._wakeup: tuple[socket.socket, socket.socket] | None = None

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Note the handlers that others have installed."""
        self._previous = {number: signal.getsignal(number) for number in _SIGNALS}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Install ours, which Python allows in the main thread only. Not before: Lightning's own for SIGTERM, installed
        meanwhile, starts a collective that other ranks are not in."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number in _SIGNALS:
            signal.signal(number, self._request)
        heard, woken = self._wakeup = socket.socketpair()
        woken.setblocking(False)
        signal.set_wakeup_fd(woken.fileno(), warn_on_full_buffer=False)
        activity = cast(DrafterModule, pl_module).activity
        threading.Thread(target=self._watch, args=(heard, activity, trainer.global_rank), daemon=True).start()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """As after training, unless the process was asked to end and may still be held up."""
        if not self.requested:
            self.teardown(trainer, pl_module, "fit")

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Give the handlers back."""
        if self._wakeup is not None:
            signal.set_wakeup_fd(-1)
            self._wakeup[1].close()  # ends the thread
            self._wakeup = None
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous = {}

    def _request(self, number: int, frame: Any) -> None:
        self.requested = True
        signal.signal(number, signal.default_int_handler)

    def _watch(self, heard: socket.socket, activity: Activity, rank: int) -> None:
        """Until training ends, which closes the connection, or the process must be left."""
        seen: set[int] = set()
        deadline = math.inf
        heard.settimeout(0.2)
        while time.monotonic() < deadline:
            grace = _SAVING_SECONDS if activity.phase == SAVING else self.grace
            if seen and activity.stalled() > grace + activity.longest:
                break
            try:
                numbers = heard.recv(64)
            except TimeoutError:
                continue
            if not numbers:
                return
            for number in (number for number in numbers if number in _SIGNALS):
                if number in seen:
                    deadline = min(deadline, time.monotonic() + _UNWINDING)
                seen.add(number)
                activity.stopping = True
        print(f"interrupted: rank {rank} was {activity.where()}, and is left there", file=sys.stderr, flush=True)
        os._exit(INTERRUPTED)

    def agreed(self, trainer: Trainer) -> bool:
        """Whether any rank was asked to stop. Every rank must call it."""
        if trainer.world_size == 1:
            return self.requested
        return trainer.strategy.reduce_boolean_decision(self.requested, all=False)
