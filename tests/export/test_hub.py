"""``export hub=USER/NAME`` against a hub on loopback that keeps what it is sent: files, card, figures, one commit."""

import base64
import json
import runpy
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import yaml

REPOSITORY = Path(__file__).parents[2]


class Hub:
    """What was pushed, by path, and the requests that asked for it. ``refuses``: a status for commits."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.created: list[dict[str, Any]] = []
        self.messages: list[str] = []
        self.refuses: int | None = None
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                assert self.headers["Authorization"] == "Bearer hf_test"
                if self.path == "/api/repos/create":
                    hub.created.append(json.loads(body))
                    return self.answer(200, {"url": f"{hub.url}/me/head", "name": "me/head"})
                if self.path.endswith("/preupload/main"):
                    paths = [each["path"] for each in json.loads(body)["files"]]
                    modes = [{"path": path, "uploadMode": "regular", "shouldIgnore": False} for path in paths]
                    return self.answer(200, {"files": modes})
                if self.path == "/api/validate-yaml":
                    return self.answer(200, {"errors": [], "warnings": []})
                assert self.path == "/api/models/me/head/commit/main"
                if hub.refuses:
                    return self.answer(hub.refuses, {"error": "no rights to write here"})
                for line in body.splitlines():
                    said = json.loads(line)
                    if said["key"] == "header":
                        hub.messages.append(said["value"]["summary"])
                    else:
                        hub.files[said["value"]["path"]] = base64.b64decode(said["value"]["content"])
                return self.answer(200, {"commitUrl": f"{hub.url}/me/head/commit/1", "commitOid": "1"})

            def answer(self, status: int, content: dict[str, Any]) -> None:
                data = json.dumps(content).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: Any) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}"
        threading.Thread(target=self.http.serve_forever, args=(0.01,), daemon=True).start()


@pytest.fixture
def hub(monkeypatch):
    hub = Hub()
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", hub.url)
    monkeypatch.setenv("HF_TOKEN", "hf_test")
    yield hub
    hub.http.shutdown()
    hub.http.server_close()


@pytest.fixture
def run(monkeypatch, capsys):
    """run(settings...) -> exit status, standard output, the sentence on standard error."""

    def call(*overrides: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["export", *map(str, overrides)])
        try:
            runpy.run_path(str(REPOSITORY / "export"), run_name="__main__")
            status = 0
        except SystemExit as ended:
            status = ended.code
        said = capsys.readouterr()
        return status, said.out, said.err

    return call


def evaluation(checkpoint: Path, quantization: str | None = None) -> None:
    """One beside the checkpoint, as a run leaves it."""
    names = {"acceptance_length": 2.5, "draft_acceptance_rate": 0.375, "speedup": 1.5}
    row = {"drafter": "eagle3", "temperature": 0.0, "drafting": "greedy", "conditional_acceptance_rate": [0.5], **names}
    other = row | {"drafter": "prompt_lookup", "speedup": 9.0}
    settings = {"benchmark": "chat", "prompts": 3, "max_new_tokens": 9, "draft_tree": "chains", "dtype": "float32"}
    settings |= {"device": "cpu", "quantization": quantization}
    measured = {"settings": settings, "results": [row, other], "created": "today"}
    (checkpoint.parent / "evaluation.json").write_text(json.dumps(measured))


def test_files_card_and_figures_in_one_commit(run, hub, make_checkpoint):
    _, checkpoint = make_checkpoint()
    evaluation(checkpoint)
    status, said, _ = run(f"checkpoint={checkpoint}", "hub=me/head", "hub_private=true")
    assert status == 0 and said.endswith(f"hub: {hub.url}/me/head\n")
    exported = checkpoint.parent / "export-vllm"
    assert set(hub.files) == {"README.md", "config.json", "model.safetensors", "evaluation.json", "target.json"}
    for name in ("config.json", "model.safetensors", "target.json"):
        assert hub.files[name] == (exported / name).read_bytes()
    assert len(hub.messages) == 1 and hub.created[0]["name"] == "head"
    assert hub.created[0].get("private") is True or hub.created[0].get("visibility") == "private"

    _, metadata, card = hub.files["README.md"].decode().split("---\n", 2)
    about = yaml.safe_load(metadata)
    assert {"speculative-decoding", "eagle3", "vllm"} <= set(about["tags"])
    assert "base_model" not in about  # a directory of this machine is no repository
    metrics = [each for result in about["model-index"][0]["results"] for each in result["metrics"]]
    assert {each["type"]: each["value"] for each in metrics} == {
        "acceptance_length": 2.5,
        "draft_acceptance_rate": 0.375,
        "speedup": 1.5,  # not that of what was beside it
    }
    assert '"model": "me/head"' in card and str(exported) not in card
    assert json.loads(hub.files["evaluation.json"])["results"][0]["speedup"] == 1.5


def test_figures_of_other_weights_are_not_published(run, hub, make_checkpoint):
    _, checkpoint = make_checkpoint()
    evaluation(checkpoint, "int8")
    assert run(f"checkpoint={checkpoint}", "hub=me/head")[0] == 0
    assert "evaluation.json" not in hub.files and b"model-index" not in hub.files["README.md"]


def test_the_target_of_the_hub_is_the_base_model(run, hub, save, make_checkpoint):
    _, checkpoint = make_checkpoint()
    config = json.loads((checkpoint / "config.json").read_text())
    config["target"]["name"] = "meta-llama/Llama-3.1-8B-Instruct"
    (checkpoint / "config.json").write_text(json.dumps(config))
    assert run(f"checkpoint={checkpoint}", "hub=me/head")[0] == 0
    assert b"base_model: meta-llama/Llama-3.1-8B-Instruct" in hub.files["README.md"]


def test_what_the_hub_refuses_is_one_sentence_and_the_export_stays(run, hub, make_checkpoint):
    _, checkpoint = make_checkpoint()
    hub.refuses = 403
    status, _, error = run(f"checkpoint={checkpoint}", "hub=me/head")
    assert status == 2 and error.count("\n") == 1
    assert "the hub did not take me/head" in error and "what was exported stays in" in error
    assert (checkpoint.parent / "export-vllm" / "model.safetensors").is_file()


@pytest.mark.parametrize("name", ["head", "me/you/head", "me/he ad", "me/"])
def test_a_name_that_is_none_ends_before_anything_is_written(run, hub, make_checkpoint, name):
    _, checkpoint = make_checkpoint()
    status, _, error = run(f"checkpoint={checkpoint}", f"hub='{name}'")
    assert status == 2 and "expected USER/NAME" in error and not (checkpoint.parent / "export-vllm").exists()


def test_without_a_token(run, hub, make_checkpoint, monkeypatch):
    _, checkpoint = make_checkpoint()
    monkeypatch.setattr("specdraft.export.hub.get_token", lambda: None)
    status, _, error = run(f"checkpoint={checkpoint}", "hub=me/head")
    assert status == 2 and "run `hf auth login`, or set HF_TOKEN" in error and hub.created == []
