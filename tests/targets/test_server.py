"""Hidden states from a server: those of this process, or one sentence. The server speaks as vLLM and its connector do.

What the real vLLM gives is compared in ``make parity-features``.
"""

import fcntl
import json
import random
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from specdraft.data.store import Store
from specdraft.embedded.tokenizer import train_tokenizer
from specdraft.errors import UserError
from specdraft.targets import Target
from specdraft.targets.server import Server
from tests.data.store.conftest import LAYERS, Making
from tests.fakes import tiny_llama


class Waiting(ThreadingHTTPServer):
    """More connections may wait than Python's five; beyond them the kernel drops some for a second."""

    request_queue_size = 64


class Engine:
    """Extracts ``layers`` of a target, the last before its norm, and writes them a while after it has answered."""

    _one = threading.Lock()  # all of them hook into the same target

    def __init__(self, making: Making, folder: Path) -> None:
        self.target, self.folder, self.layers = making.target, folder, [*LAYERS, making.target.num_layers]
        self.faults: list[str] = []  # of the next answers
        self.asked: list[int] = []  # lengths of documents
        self.held: list[Any] = []
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
                    engine.held.append(lock)
                return self.answer(200, {"kv_transfer_params": {"hidden_states_path": str(path)}})

            def answer(self, status: int, content: dict[str, Any]) -> None:
                data = json.dumps(content).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: Any) -> None:
                pass

        self.http = Waiting(("127.0.0.1", 0), Handler)
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


@pytest.fixture
def second(making, tmp_path):
    engine = Engine(making, tmp_path / "second")
    yield engine
    engine.http.shutdown()
    engine.http.server_close()


def server(engine: Engine, *others: Engine, **options: Any) -> Server:
    urls = [each.url for each in (engine, *others)]
    return Server(
        urls if others else engine.url, **{"concurrency": 4, "timeout": 5, "attempts": 3, "backoff": 0.5} | options
    )


def test_a_store_from_a_server_is_the_store_of_this_process(making, engine, tmp_path):
    expected = making.store()
    engine.faults = ["503", "drop"]  # both pass
    with server(engine).open(making.target, LAYERS, 32) as capture:
        making.writer(tmp_path / "remote").write(capture, 3)
    found = Store(tmp_path / "remote")
    for split, rows in making.batches.items():
        order = range(len(rows.input_ids))
        ours, theirs = (store.read(split, order).decode(torch.float32) for store in (expected, found))
        torch.testing.assert_close(theirs, ours, rtol=1e-5, atol=1e-5)
    documents = sum(int((rows.position_ids == 0).sum()) for rows in making.batches.values())
    assert len(engine.asked) == documents + 1 + 2  # a probe, two failures
    assert max(engine.asked[-documents:]) < 32  # never a packed row
    assert list(engine.folder.iterdir()) == []


def test_a_drafter_may_read_the_last_layer_before_the_norm(making, engine):
    last = making.target.num_layers
    engine.layers = [1, last]
    ids = torch.arange(12)[None] % making.target.vocab_size
    with Server(engine.url).connect(making.target, (1, last)) as connection:
        theirs = connection.features(ids, torch.arange(12)[None])
    ours = making.target.features(ids, torch.arange(12)[None], (1, last))
    for found, expected in zip(theirs, ours, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("layers", "sentence"),
    [
        ([0, 2, 4], r"hidden states of layer [13] that differ .* serve that model, and extract layers \[1, 3, 4\]"),
        ([1, 3, 3], "hidden states of the last layer that differ"),
        ([1, 4], r"extracts hidden states of shape \[32, 2, 32\] .* expected \[32, 3, 32\], of layers \[1, 3, 4\]"),
    ],
)
def test_other_layers_are_refused_before_anything_is_read(making, engine, layers, sentence):
    engine.layers = layers
    with pytest.raises(UserError, match=sentence), server(engine).open(making.target, LAYERS, 32):
        pass
    assert set(engine.asked) == {32}


def test_another_model_is_refused(making, engine):
    other = Target.from_model(tiny_llama(num_hidden_layers=4, initializer_range=0.5), name="other")
    with (
        pytest.raises(
            UserError,
            match=r"the target here, a LlamaForCausalLM, by .* of their norm, expected less than 0\.001",
        ),
        server(engine).open(other, LAYERS, 32),
    ):
        pass


@pytest.mark.parametrize(
    ("faults", "sentence"),
    [
        (["400"], r"refuses /completions with status 400 \(.*no room for this.*expected vLLM's server"),
        (["503"] * 3, r"failed 3 times at /completions \(status 503: .*no room for this"),
        (["forgets"], "sends no hidden states: expected vLLM with the method extract_hidden_states"),
        (["dies"], "cannot read the hidden states .*expected a file that vLLM has written"),
        (["stalls"], r"cannot read the hidden states .*not written within 0\.2 s"),
        (["mixes up"], r"extracts hidden states of shape .*expected"),
    ],
)
def test_what_a_server_does_wrong_is_one_sentence(making, engine, faults, sentence):
    ids = torch.arange(3, 9)[None]
    with server(engine, timeout=0.2).open(making.target, LAYERS, 32) as capture:
        before = len(engine.asked)
        engine.faults = list(faults)
        with pytest.raises(UserError, match=sentence):
            capture(ids, torch.arange(6)[None])
        assert len(engine.asked) - before == len(faults)
        engine.faults = []
        assert capture(ids, torch.arange(6)[None]).last.shape == (1, 6, 32)  # the connection goes on


def test_nobody_there_and_settings_that_cannot_be(making, engine):
    engine.http.shutdown()
    engine.http.server_close()
    with (
        pytest.raises(UserError, match=r"failed 1 times at /models \(ConnectError"),
        server(engine, attempts=1).open(making.target, LAYERS, 32),
    ):
        pass
    with pytest.raises(UserError, match=r"features has concurrency=0"):
        Server(engine.url, concurrency=0)


def test_a_remote_target_reads_as_this_process_does(making, engine, tmp_path):
    making.target.model.save_pretrained(tmp_path / "target")
    train_tokenizer(["def add(a, b):\n    return a + b\n"] * 3, 300, 128).save_pretrained(tmp_path / "target")
    options = {"dtype": "float32", "placement": "remote"}
    with pytest.raises(UserError, match=r"target.placement is remote and target.url None: expected the address"):
        Target.load(str(tmp_path / "target"), **options)
    remote = Target.load(str(tmp_path / "target"), **options, url=engine.url)
    assert all(weight.is_meta for weight in remote.decoder.layers.parameters())
    assert remote.identity.weights_hash == making.target.identity.weights_hash
    rows = making.batches["train"]
    with torch.inference_mode():
        found = remote.features(rows.input_ids[:2], rows.position_ids[:2], LAYERS)
        expected = making.features(rows.input_ids[:2], rows.position_ids[:2])
        documents = len(engine.asked)
        remote.features(rows.input_ids[:2], rows.position_ids[:2], LAYERS)
    torch.testing.assert_close(found.aux, expected.aux)
    torch.testing.assert_close(found.last, expected.last)
    # The text that is compared first is asked for once.
    assert len(engine.asked) - documents == documents - 1 > 2


def test_servers_share_the_documents_and_one_may_die(making, engine, second):
    rows = making.batches["train"]
    expected = making.features(rows.input_ids, rows.position_ids)
    documents = int((rows.position_ids == 0).sum())
    with server(engine, second, attempts=2, backoff=0.01).open(making.target, LAYERS, 32) as capture:
        assert engine.asked == second.asked == [32]  # each is checked
        torch.testing.assert_close(capture(rows.input_ids, rows.position_ids), expected)
        assert min(len(engine.asked), len(second.asked)) > 2
        assert len(engine.asked) + len(second.asked) == documents + 2
        second.faults = ["dies", *["drop"] * 100]  # it has answered, and its file never comes
        with pytest.warns(UserWarning, match=f"the server {second.url}v1 .*: the others do its work"):
            torch.testing.assert_close(capture(rows.input_ids, rows.position_ids), expected)
        asked = len(second.asked)
        torch.testing.assert_close(capture(rows.input_ids, rows.position_ids), expected)
        assert len(second.asked) == asked


@pytest.mark.slow
def test_two_thousand_documents_of_a_server_that_fails(making, engine):
    """16 at a time; one request in five fails."""
    ids = torch.randint(3, making.target.vocab_size, (500, 32), generator=torch.Generator().manual_seed(0))
    positions = (torch.arange(32) % 8).expand(500, -1)
    chance = random.Random(0)
    faults = [chance.choice(["503", "drop"]) if chance.random() < 0.2 else None for _ in range(3000)]
    with server(engine, concurrency=16, attempts=12, backoff=0.01).open(making.target, LAYERS, 32) as capture:
        engine.asked, engine.faults = [], list(faults)
        for rows, places in zip(ids.split(4), positions.split(4), strict=True):
            torch.testing.assert_close(capture(rows, places), making.features(rows, places), rtol=1e-4, atol=1e-4)
    failed = sum(fault is not None for fault in faults[: len(engine.asked)])
    assert set(engine.asked) == {8} and len(engine.asked) == 2000 + failed and failed > 300
    assert list(engine.folder.iterdir()) == []


def test_each_server_is_checked_at_the_start(making, engine, second):
    second.layers = [0, 2, 4]
    with (
        pytest.raises(UserError, match=f"the server {second.url}v1 gives hidden states of layer"),
        server(engine, second).open(making.target, LAYERS, 32),
    ):
        pass
