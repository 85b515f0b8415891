"""The real vLLM as a server on loopback, started from an environment of its own and gone afterwards."""

import os
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

import httpx

from specdraft.errors import UserError

SECONDS_TO_START = 600  # of which a compiled model takes most, the first time
_ENVIRONMENT = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}


@contextmanager
def serving(python: Path, model: str, flags: Sequence[str], threads: int) -> Iterator[str]:
    """The address of a server of ``model`` on ``threads`` cores. Raises UserError if it does not start."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    # What `vllm serve` runs; the CPU build's own command asks for a package named vllm, which it is not.
    command = [str(python), "-P", "-m", "vllm.entrypoints.openai.api_server", "--model", model]
    command += ["--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", *flags]
    url = f"http://127.0.0.1:{port}"
    environment = os.environ | _ENVIRONMENT | {"OMP_NUM_THREADS": str(threads)}
    with tempfile.TemporaryFile("w+") as log:
        # A session of its own: the engine's children end with it.
        server = subprocess.Popen(
            command, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            _wait(server, url, log)
            yield url
        finally:
            _end(server)


def counts(url: str) -> Mapping[str, float]:
    """What the server has drafted so far: ``rounds``, ``drafted`` and ``accepted`` tokens; zeros without drafts."""
    found = {"drafts": 0.0, "draft_tokens": 0.0, "accepted_tokens": 0.0}
    for line in httpx.get(f"{url}/metrics", timeout=10, trust_env=False).text.splitlines():
        for name in found:
            if line.startswith(f"vllm:spec_decode_num_{name}_total"):
                found[name] += float(line.split()[-1])
    return dict(zip(("rounds", "drafted", "accepted"), found.values(), strict=True))


def _wait(server: subprocess.Popen[bytes], url: str, log: IO[str]) -> None:
    started = time.perf_counter()
    while not _answers(url):
        if server.poll() is not None or time.perf_counter() - started > SECONDS_TO_START:
            log.seek(0)
            raise UserError(f"vllm serve did not start: expected it to answer at {url}\n{log.read()[-3000:]}")
        time.sleep(0.5)


def _answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=2, trust_env=False).status_code == 200
    except httpx.TransportError:
        return False


def _end(server: subprocess.Popen[bytes]) -> None:
    """Politely, then by force; nothing of its process group stays."""
    server.terminate()
    with suppress(subprocess.TimeoutExpired):
        server.wait(20)
    with suppress(ProcessLookupError):
        os.killpg(server.pid, 9)
    server.wait()
