"""Fake engines: in this process, and as a program."""

import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from specdraft.bench.streaming import Question
from tests.bench.engine import World


@pytest.fixture
def world() -> Iterator[Callable[..., World]]:
    """world(**options) -> a running fake engine."""
    running: list[tuple[World, threading.Thread]] = []

    def start(**options: Any) -> World:
        server = World(**options)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        running.append((server, thread))
        return server

    yield start
    for server, thread in running:
        server.ended.set()
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.fixture
def program(tmp_path: Path) -> Path:
    """The fake engine as a program of the name ``vllm``."""
    path = tmp_path / "bin" / "vllm"
    path.parent.mkdir()
    path.write_text(f'#!/bin/sh\nexec {sys.executable} {Path(__file__).with_name("engine.py")} "$@"\n')
    path.chmod(0o755)
    return path


@pytest.fixture
def questions() -> list[Question]:
    """Six, of two categories."""
    return [Question(n, 0, "ab"[n % 2], ({"role": "user", "content": "x" * (n + 1)},)) for n in range(6)]
