"""The connector for vLLM's CPU build, on a stand-in for the class that it changes."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

import specdraft.data.store

BASE = "vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector"
FILE = Path(specdraft.data.store.__file__).parent / "vllm_connector.py"


@pytest.fixture
def connector(monkeypatch: pytest.MonkeyPatch) -> Any:
    """An object of the connector's class with three blocks of four slots, and the files that it wrote."""

    class Example:
        def _write_tensors(self, tensors: Any, event: Any, filename: str, lock: int | None) -> None:
            assert event.query() is True
            event.synchronize()
            self.written.append((tensors, filename, lock))

    base = ModuleType(BASE)
    base.ExampleHiddenStatesConnector, base.PendingSave = Example, SimpleNamespace
    base.extract_from_kv_cache = lambda cache, slots, count: cache.flatten(0, 1)[slots[:count]]
    parts = BASE.split(".")
    for end in range(1, len(parts)):
        monkeypatch.setitem(sys.modules, ".".join(parts[:end]), ModuleType(".".join(parts[:end])))
    monkeypatch.setitem(sys.modules, BASE, base)
    spec = importlib.util.spec_from_file_location("vllm_connector", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    made = module.HiddenStatesOnCPU()
    made._is_tp_rank_zero, made._block_size = True, 4
    made._kv_cache = torch.arange(3 * 4 * 2 * 5.0).view(3, 4, 2, 5)  # 3 blocks of 4 slots, a = 2, H = 5
    made._req_copy_events, made._lock_fds, made.written = {}, {"r": 7}, []
    return made


def pending(folder: Path) -> SimpleNamespace:
    tokens = torch.tensor([5, 6, 7, 8, 9, 10])
    return SimpleNamespace(req_id="r", block_ids=[2, 0], token_ids=tokens, filename=str(folder / "new" / "file"))


def test_a_requests_states_are_written_at_once_in_the_order_of_its_blocks(connector: Any, tmp_path: Path) -> None:
    request = pending(tmp_path)
    connector._submit_async_write(request)
    ((tensors, filename, lock),) = connector.written
    assert torch.equal(tensors["hidden_states"], torch.cat([connector._kv_cache[2], connector._kv_cache[0][:2]]))
    assert torch.equal(tensors["token_ids"], request.token_ids)
    assert (filename, lock) == (request.filename, 7) and Path(filename).parent.is_dir()
    assert connector._req_copy_events["r"].query() and not connector._lock_fds


def test_other_ranks_of_the_engine_write_nothing(connector: Any, tmp_path: Path) -> None:
    connector._is_tp_rank_zero = False
    connector._submit_async_write(pending(tmp_path))
    assert not connector.written and not (tmp_path / "new").exists()
