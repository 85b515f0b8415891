"""The vLLM that is started for hidden states. What the real one gives is compared in ``make parity-features``."""

import fcntl
import json
import multiprocessing
import os
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from specdraft.data.store.vllm import VLLM
from specdraft.errors import UserError
from tests.data.store.conftest import LAYERS, Making


class Engine:
    """Extracts ``layers`` of a target, the last before its norm, and writes them a while after it has answered."""

    def __init__(self, making: Making, folder: Path) -> None:
        self.target, self.folder, self.layers = making.target, folder, [*LAYERS, making.target.num_layers]
        self.faults: list[str] = []  # of the next answers
        self.asked: list[int] = []  # lengths of documents
        self._one = threading.Lock()
        folder.mkdir()
        engine = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.answer(200, {"data": [{"id": "served"}]})

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                assert (body["model"], body["max_tokens"]) == ("served", 1)
                engine.asked.append(len(body["prompt"]))
                fault = engine.faults.pop(0) if engine.faults else None
                if fault == "drop":
                    return self.connection.close()
                if fault in ("503", "400"):
                    return self.answer(int(fault), {"error": "no room for this"})
                if fault == "forgets":
                    return self.answer(200, {"kv_transfer_params": None})
                path, states = engine.folder / f"{time.monotonic_ns()}.safetensors", engine.states(body["prompt"])
                lock = open(f"{path}.lock", "w")  # noqa: SIM115
                fcntl.flock(lock, fcntl.LOCK_EX)
                if fault != "stalls":
                    threading.Timer(0.01, engine.write, (path, states, body["prompt"], lock, fault)).start()
                else:
                    engine.held = lock
                return self.answer(200, {"kv_transfer_params": {"hidden_states_path": str(path)}})

            def answer(self, status: int, content: dict[str, Any]) -> None:
                data = json.dumps(content).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: Any) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}/"
        threading.Thread(target=self.http.serve_forever, args=(0.01,), daemon=True).start()

    def states(self, ids: list[int]) -> torch.Tensor:
        # The last of transformers' own layer outputs is normed; what goes into the norm is the last layer's.
        last: list[torch.Tensor] = []
        with self._one, torch.inference_mode():
            hook = self.target.decoder.norm.register_forward_pre_hook(lambda _module, inputs: last.append(inputs[0]))
            found = self.target.model(torch.tensor([ids]), output_hidden_states=True, use_cache=False).hidden_states
            hook.remove()
        by_layer = {**dict(enumerate(found[:-1])), self.target.num_layers: last[0]}
        return torch.cat([by_layer[layer] for layer in self.layers]).transpose(0, 1).contiguous()

    def write(self, path: Path, states: torch.Tensor, ids: list[int], lock: Any, fault: str | None) -> None:
        if fault != "dies":
            told = [0, *ids[1:]] if fault == "mixes up" else ids
            save_file({"hidden_states": states, "token_ids": torch.tensor(told)}, path)
        lock.close()


@pytest.fixture
def engine(making, tmp_path):
    engine = Engine(making, tmp_path / "passing")
    yield engine
    engine.http.shutdown()
    engine.http.server_close()


def test_what_vllm_is_asked_to_extract(making):
    options = VLLM("python", ["--tensor-parallel-size=8"], cpu=False).arguments(making.target, LAYERS, 32, "/states")
    given = dict(option.removeprefix("--").split("=", 1) for option in options if "=" in option)
    assert (given["model"], given["dtype"], given["max-model-len"]) == ("tiny", "float32", "33")
    speculative = json.loads(given["speculative-config"])
    assert speculative["draft_model_config"]["hf_config"] == {"eagle_aux_hidden_state_layer_ids": [1, 3, 4]}
    connector = json.loads(given["kv-transfer-config"])
    assert connector["kv_connector"] == "ExampleHiddenStatesConnector"
    assert connector["kv_connector_extra_config"] == {"shared_storage_path": "/states"}
    assert options[-1] == "--tensor-parallel-size=8" and "--enforce-eager" not in options


def test_a_vllm_that_does_not_start_leaves_its_log(making, tmp_path, monkeypatch):
    with (
        pytest.raises(UserError, match=r"cannot start /no/python .*expected features\.python=PATH"),
        VLLM("/no/python", directory=str(tmp_path)).open(making.target, LAYERS, 32),
    ):
        pass
    engine = VLLM(sys.executable, directory=str(tmp_path), cpu=True)
    with pytest.raises(UserError, match=r"vLLM did not start and ended with 1: its log .* says why") as refused:
        engine.open(making.target, LAYERS, 32).__enter__()
    log = Path(str(refused.value).split("its log ")[1].split(" says")[0])
    assert "No module named" in log.read_text() and "HiddenStatesOnCPU" in log.read_text()
    assert not [path for path in tmp_path.iterdir() if path.is_dir()]
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match="expected no torchrun"):
        engine.open(making.target, LAYERS, 32).__enter__()


def test_who_is_killed_leaves_no_engine_behind(tmp_path):
    def start() -> None:
        process = VLLM(cpu=True)._start(["sleep", "60"], os.open(os.devnull, os.O_WRONLY), str(tmp_path))
        (tmp_path / "pid").write_text(f"{process.pid}\n")
        time.sleep(60)

    killed = multiprocessing.get_context("fork").Process(target=start)
    killed.start()
    deadline = time.monotonic() + 30
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text().endswith("\n"):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    pid = int((tmp_path / "pid").read_text())
    assert _runs(pid)
    killed.kill()
    killed.join()
    while _runs(pid):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except FileNotFoundError:
        return False
