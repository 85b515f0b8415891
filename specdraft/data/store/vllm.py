"""Hidden states from a vLLM that is started for them, in an environment of its own, and stopped afterwards."""

import ctypes
import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import httpx
import torch

from specdraft.data.store.source import FeatureSource
from specdraft.errors import UserError
from specdraft.targets import Capture, Target
from specdraft.targets.loading import location
from specdraft.targets.server import Server, extracted

_CONNECTOR = Path(__file__).parent / "vllm_connector.py"
_PR_SET_PDEATHSIG = 1


@dataclass
class VLLM(FeatureSource):
    """vLLM's server on loopback, and a client of it.
    ``python``: that of an environment with vLLM. ``options``: more of ``vllm serve``'s. ``directory``: where hidden
    states pass through, None for the system's temporary one. ``cpu``: whether vLLM is a CPU build, None if there is no
    GPU. ``start_timeout``: seconds until it answers."""

    python: str = sys.executable
    options: Sequence[str] = ()
    directory: str | None = None
    cpu: bool | None = None
    concurrency: int = 64
    start_timeout: float = 1800.0

    def __post_init__(self) -> None:
        if self.cpu is None:
            self.cpu = not torch.cuda.is_available()

    @contextmanager
    def open(self, target: Target, layers: Sequence[int], sequence_length: int) -> Iterator[Capture]:
        """Start vLLM and wait for it. Raises UserError, with the log to read, if it does not start."""
        if int(os.environ.get("WORLD_SIZE", 1)) > 1:
            raise UserError(
                "features=vllm starts one engine for one process: expected no torchrun; let the engine use more "
                "devices with features.options=[--tensor-parallel-size=8], or start it yourself and use features=server"
            )
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        with tempfile.TemporaryDirectory(prefix="specdraft-", dir=self.directory) as folder:
            log = Path(folder).with_suffix(".log")
            command = [self.python, "-P", "-m", "vllm.entrypoints.openai.api_server"]
            command += self.arguments(target, layers, sequence_length, folder)
            command += ["--host=127.0.0.1", f"--port={port}"]
            with log.open("w") as output:
                output.write(shlex.join(command) + "\n\n")
                output.flush()
                process = self._start(command, output.fileno(), folder)
            try:
                url = f"http://127.0.0.1:{port}"
                self._wait(process, url, log)
                with Server(url, concurrency=self.concurrency).open(target, layers, sequence_length) as capture:
                    yield capture
            finally:
                process.terminate()
                with suppress(subprocess.TimeoutExpired):
                    process.wait(60)
                process.kill()  # which nothing comes of if it has ended
                process.wait()
            log.unlink()

    def arguments(self, target: Target, layers: Sequence[int], sequence_length: int, folder: str) -> list[str]:
        """The server's options, so that it leaves the hidden states in ``folder``."""
        ids = {"eagle_aux_hidden_state_layer_ids": extracted(target, layers)}
        speculative = {"method": "extract_hidden_states", "num_speculative_tokens": 1}
        speculative |= {"draft_model_config": {"hf_config": ids}}
        name = "HiddenStatesOnCPU" if self.cpu else "ExampleHiddenStatesConnector"
        storage = {"shared_storage_path": folder}
        connector = {"kv_connector": name, "kv_role": "kv_producer", "kv_connector_extra_config": storage}
        if self.cpu:
            connector["kv_connector_module_path"] = _CONNECTOR.stem
        revision = target.identity.revision
        return [
            f"--model={location(target.identity.name)}",
            *([f"--revision={revision}"] if revision else []),
            f"--dtype={str(target.dtype).removeprefix('torch.')}",
            f"--max-model-len={sequence_length + 1}",  # a token is sampled, and forgotten
            "--no-enable-prefix-caching",
            f"--speculative-config={json.dumps(speculative)}",
            f"--kv-transfer-config={json.dumps(connector)}",
            *(["--enforce-eager"] if self.cpu else []),
            *self.options,
        ]

    def _start(self, command: list[str], log: int, folder: str) -> subprocess.Popen[bytes]:
        # The sampled token's position may lie one after the last that the target knows; it is never read.
        given = {"VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1"}
        if self.cpu:  # a copy, because the connector's own folder holds modules that vLLM is not to find
            shutil.copy(_CONNECTOR, folder)
            given["PYTHONPATH"] = folder
        environment = os.environ | given
        try:
            return subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, preexec_fn=_end_with_us
            )
        except OSError as error:
            said = f"cannot start {self.python} ({error.strerror})"
            raise UserError(f"{said}: expected features.python=PATH, that of an environment with vLLM") from error

    def _wait(self, process: subprocess.Popen[bytes], url: str, log: Path) -> None:
        deadline = time.monotonic() + self.start_timeout
        while time.monotonic() < deadline and process.poll() is None:
            with suppress(httpx.TransportError):
                if httpx.get(f"{url}/health", timeout=5).is_success:
                    return
            time.sleep(0.5)
        state = f"within {self.start_timeout:g} s" if process.poll() is None else f"and ended with {process.returncode}"
        raise UserError(f"vLLM did not start {state}: its log {log} says why; mend it, or raise features.start_timeout")


def _end_with_us() -> None:
    """The engine ends when this process is killed."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
