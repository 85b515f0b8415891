"""An engine is there when it answers by its own name, and nothing of it stays."""

import os
import signal
import socket
import sys
from pathlib import Path

import pytest

from specdraft.bench import process
from specdraft.bench.process import Server, ended_by_signals
from specdraft.errors import UserError
from tests.bench.engine import World

ENGINE = Path(__file__).with_name("engine.py")


def start(*words: str, timeout: float = 20.0) -> Server:
    return Server(
        lambda port, model: [sys.executable, str(ENGINE), *words, "--port", str(port), "--served-model-name", model],
        os.environ,
        timeout,
    )


def test_it_serves_until_it_is_ended():
    server = start()
    server.check()
    assert 1e6 < server.memory() < 1e9  # of an interpreter
    server.end()
    assert server.memory() == 0
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])), timeout=1)


@pytest.mark.parametrize(
    ("words", "timeout", "said"),
    [
        (["--die"], 20.0, "ended with status 1 before it was ready.*no memory for the cache"),
        (["--deaf"], 0.5, r"not ready within 0.5 s \(engine.start_timeout\)"),
    ],
)
def test_an_engine_that_does_not_start_is_one_sentence_and_ended(words, timeout, said):
    with pytest.raises(UserError, match=said):
        start(*words, timeout=timeout)


def test_a_program_that_cannot_be_run(tmp_path):
    with pytest.raises(UserError, match=r"cannot be started .*engine\.command"):
        Server(lambda port, model: [str(tmp_path / "nothing")], os.environ, 1.0)


def test_another_port_is_tried_where_one_was_taken_and_its_server_is_not_mistaken_for_ours(world, monkeypatch):
    other: World = world(model="somebody's")
    ports = iter([other.server_port, process._free_port()])
    monkeypatch.setattr(process, "_free_port", lambda: next(ports))
    server = start()
    assert server.url != other.url
    server.end()


def test_a_dead_engine_is_named_with_the_end_of_its_log():
    server = start()
    os.kill(server._process.pid, 9)
    server._process.wait()
    with pytest.raises(UserError, match="died with status -9, and what it measured is lost"):
        server.check()
    server.end()


def test_a_signal_to_end_unwinds():
    with pytest.raises(KeyboardInterrupt), ended_by_signals():
        signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
