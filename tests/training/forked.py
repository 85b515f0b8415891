"""Ranks as processes that have imported everything already: scenarios that kill them cost a second instead of ten.

A server process imports the worker once and forks from there; it has run no step, so that autograd works in its forks.
"""

import multiprocessing
import os
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightning.pytorch.utilities import rank_zero_only

from specdraft.errors import exit_on_user_error

_SERVER = multiprocessing.get_context("forkserver")
_MODULES = ["tests.training.faults_worker", "specdraft.training.fit", "specdraft.training.preflight"]
_MODULES += ["deepspeed.runtime.zero.muon.muon_optimizer"]  # which brings a compiler that nothing here asks for
_SERVER.set_forkserver_preload(_MODULES)


class Ranks:
    """Processes that run ``work(*arguments)`` as ranks of one world, and what they say."""

    def __init__(self, logs: Path, world_size: int, work: Callable[..., Any], *arguments: Any) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        logs.mkdir(parents=True, exist_ok=True)
        self.logs = [logs / f"rank-{rank}.log" for rank in range(world_size)]
        self.processes: list[Any] = []
        for rank in range(world_size):
            environment = {
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "WORLD_SIZE": str(world_size),
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "NODE_RANK": "0",
                "HF_HUB_OFFLINE": "1",
            }
            process = _SERVER.Process(target=_run, args=(self.logs[rank], environment, work, arguments))
            process.start()
            self.processes.append(process)

    def wait_for(self, text: str, rank: int = 0, seconds: float = 100) -> None:
        """Until a rank has said ``text``."""
        end = time.monotonic() + seconds
        while text not in self.said(rank):
            assert self.processes[rank].is_alive() and time.monotonic() < end, self.said(rank)
            time.sleep(0.02)

    def kill(self, rank: int, number: int) -> None:
        """Send a rank a signal."""
        os.kill(self.processes[rank].pid, number)

    def end(self, rank: int, seconds: float = 100) -> int:
        """The exit status of a rank, once it has ended."""
        self.processes[rank].join(seconds)
        status = self.processes[rank].exitcode
        if status is None:
            self.processes[rank].kill()
        assert status is not None, f"rank {rank} did not end within {seconds} s: {self.said(rank)}"
        return status

    def stop(self) -> None:
        """Kill those that still run."""
        for process in self.processes:
            process.kill()

    def said(self, rank: int = 0) -> str:
        """What a rank has printed up to now."""
        return self.logs[rank].read_text(errors="replace") if self.logs[rank].exists() else ""


def _run(log: Path, environment: dict[str, str], work: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    place = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(place, sys.stdout.fileno())
    os.dup2(place, sys.stderr.fileno())
    os.environ |= environment
    rank_zero_only.rank = int(environment["RANK"])  # Lightning reads it as it is imported
    exit_on_user_error(work)(*arguments)
