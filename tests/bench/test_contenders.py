"""Who takes part, and that nobody's server is left."""

import signal

import pytest

from specdraft.bench import contenders as module
from specdraft.bench import process
from specdraft.bench.contenders import contenders, running, served
from specdraft.bench.engines import VLLMServer
from specdraft.errors import UserError
from specdraft.export.vllm import VLLM


def test_plain_then_ngram_of_every_length(tmp_path):
    found = contenders(VLLMServer(), VLLM, [], [1, 3], True, tmp_path)
    assert [each.name for each in found] == ["plain", "ngram K=1", "ngram K=3"]
    with pytest.raises(UserError, match="nothing beside plain decoding"):
        contenders(VLLMServer(), VLLM, [], [1], False, tmp_path)
    with pytest.raises(UserError, match=r"draft_tokens is \[0\]"):
        contenders(VLLMServer(), VLLM, [], [0], True, tmp_path)


def test_heads_are_exported_and_named(tmp_path, monkeypatch):
    drafter = type("Drafter", (), {"family": "eagle3"})()
    monkeypatch.setattr(module, "load_drafter", lambda path: (drafter, {}))
    monkeypatch.setattr(module, "export", lambda checkpoint, engine, folder: folder)
    found = contenders(VLLMServer(), VLLM, [tmp_path, tmp_path], [2], False, tmp_path)
    assert [each.name for each in found] == ["plain", "eagle3 1 K=2", "eagle3 2 K=2"]
    assert found[2].directory == tmp_path / "head-1" and '"num_speculative_tokens": 2' in found[1].options[1]
    drafter.family = "redrafter"
    with pytest.raises(UserError, match="vllm does not draft with redrafter"):
        contenders(VLLMServer(), VLLM, [tmp_path], [2], False, tmp_path)


def test_running_servers(world):
    one, other = world(), world()
    found = running(f"{one.url}/v1", other.url)
    with served(found, VLLMServer(), "", None) as places:
        assert {name: place.url for name, place in places.items()} == {"plain": other.url, "drafting": one.url}
    assert running(None, None) == [] and len(running(one.url, None)) == 1
    with pytest.raises(UserError, match="url is 'localhost:8000'"):
        running("localhost:8000", None)
    with pytest.raises(UserError, match="expected two servers"):
        running(one.url, one.url)


def test_servers_that_do_not_fit_are_refused_before_the_second_starts(program, tmp_path, monkeypatch):
    found = contenders(VLLMServer(), VLLM, [], [1, 2, 3], True, tmp_path)
    free = type("Memory", (), {"available": 10**6})()
    monkeypatch.setattr(module.psutil, "virtual_memory", lambda: free)
    asked = []
    monkeypatch.setattr(module.Server, "memory", lambda self: asked.append(self) or 4 * 10**5)
    with (
        pytest.raises(UserError, match=r"3 servers more of 0\.0 GB each do not fit in 0\.0 GB: .* ngram=false"),
        served(found, VLLMServer(str(program)), "a/b", None),
    ):
        pass
    assert len(asked) == 1 and asked[0]._process.poll() is not None


def test_an_engine_that_dies_while_others_start_ends_the_start(program, tmp_path, monkeypatch):
    found = contenders(VLLMServer(), VLLM, [], [1, 2], True, tmp_path)

    def memory(self: process.Server) -> int:
        self._process.kill()
        self._process.wait()
        return 0

    monkeypatch.setattr(module.Server, "memory", memory)
    with pytest.raises(UserError, match="died with status"), served(found, VLLMServer(str(program)), "a/b", None):
        pass


def test_what_was_started_is_ended_whatever_happens(program, tmp_path):
    found = contenders(VLLMServer(), VLLM, [], [2], True, tmp_path)
    processes = []

    def interrupted() -> None:
        with served(found, VLLMServer(str(program)), "a/b", None) as places:
            processes.extend(place.server._process for place in places.values())
            signal.raise_signal(signal.SIGTERM)

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert len(processes) == 2
    assert all(process.poll() is not None for process in processes)
