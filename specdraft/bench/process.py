"""An engine as a server on loopback, in a process of its own that ends with the measurement, whatever happens.

The engine is called by a name that nobody else has, so that a server that answers on its port is not taken for it."""

import os
import signal
import socket
import subprocess
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

import httpx
import psutil

from specdraft.errors import UserError

_ATTEMPTS = 3  # of ports: a free one may be taken before the engine binds it
_SHOWN = 1200  # characters of an engine's log
_PATIENCE = 20  # seconds for a polite end

Command = Callable[[int, str], Sequence[str]]
"""From a port and the name of the served model to the words that start the engine."""


class Server:
    """A running engine. ``url``: its address; ``model``: what it calls the target."""

    def __init__(self, command: Command, environment: Mapping[str, str], timeout: float) -> None:
        """Start it and wait until it answers, ``timeout`` seconds at most. Raises UserError."""
        for attempt in range(1, _ATTEMPTS + 1):
            port, self.model = _free_port(), f"specdraft-{uuid.uuid4().hex[:8]}"
            self.url = f"http://127.0.0.1:{port}"
            self._log = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115  # open as long as it runs
            words = [str(word) for word in command(port, self.model)]
            try:
                # A session of its own: Ctrl-C in the terminal is for the measurement, which ends the engine's children
                # with it.
                self._process = subprocess.Popen(
                    words, env=dict(environment), stdout=self._log, stderr=subprocess.STDOUT, start_new_session=True
                )
            except OSError as error:
                self._log.close()
                expected = "expected engine.command to be a program that can be run"
                raise UserError(f"{words[0]} cannot be started ({error.strerror}): {expected}") from error
            try:
                self._wait(timeout)
                return
            except UserError:
                taken = "address already in use" in self.log().lower()
                self.end()
                if not taken or attempt == _ATTEMPTS:
                    raise
            except BaseException:
                self.end()
                raise

    def log(self) -> str:
        """The end of what the engine has written."""
        self._log.seek(0)
        return self._log.read()[-_SHOWN:]

    def check(self) -> None:
        """Raise UserError if the engine has died."""
        if (status := self._process.poll()) is not None:
            died = f"the engine at {self.url} died with status {status}, and what it measured is lost"
            raise UserError(f"{died}: expected it to serve until the end; its log ends with: {self.log()}")

    def memory(self) -> int:
        """Bytes of this machine's memory that it holds alone, with the processes that it started."""
        held = 0
        with suppress(psutil.Error):
            first = psutil.Process(self._process.pid)
            for process in (first, *first.children(recursive=True)):
                with suppress(psutil.Error):
                    held += process.memory_full_info().uss
        return held

    def end(self) -> None:
        """Politely, then by force; nothing of its process group stays, even if this is interrupted."""
        try:
            self._process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_PATIENCE)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._log.close()

    def _wait(self, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        while not self._answers():
            if (status := self._process.poll()) is not None:
                said = f"the engine ended with status {status} before it was ready"
                raise UserError(f"{said}: expected it to answer at {self.url}; its log ends with: {self.log()}")
            if time.monotonic() > deadline:
                said = f"the engine was not ready within {timeout:g} s (engine.start_timeout)"
                raise UserError(f"{said}: expected it to answer at {self.url}; its log ends with: {self.log()}")
            time.sleep(0.2)

    def _answers(self) -> bool:
        try:
            found = httpx.get(f"{self.url}/v1/models", timeout=2, trust_env=False)
            return found.status_code == 200 and self.model in [each["id"] for each in found.json()["data"]]
        except (httpx.HTTPError, ValueError, KeyError, TypeError):
            return False


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """Let SIGTERM and SIGHUP unwind as Ctrl-C does, so that what was started is ended."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    previous = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port
