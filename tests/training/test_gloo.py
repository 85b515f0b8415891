"""A rank does not leave while one of gloo's threads has tensors to give back."""

import hashlib
import threading
import time
from pathlib import Path

import pytest
import torch
from torch import distributed

from specdraft.training.gloo import gloo_threads, wait_for_gloo


@pytest.fixture
def group(tmp_path):
    """A group of this process alone."""
    store = distributed.FileStore(str(tmp_path / "store"), 1)
    made = distributed.ProcessGroupGloo(store, 0, 1)
    yield made
    del made


def test_threads_of_gloo_are_known_by_their_name(group):
    group.allreduce([torch.ones(3)]).wait()
    wait_for_gloo()
    assert gloo_threads() and set(gloo_threads()) == {"S"}


def test_a_busy_one_is_waited_for():
    began, ended = threading.Event(), threading.Event()

    def work():
        Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text("pt_gloo_runloop")
        began.set()
        for _ in range(40):
            hashlib.sha256(bytes(10_000_000)).digest()  # lets others use Python meanwhile
        ended.set()

    thread = threading.Thread(target=work)
    thread.start()
    began.wait()
    wait_for_gloo(60)
    assert ended.is_set()
    thread.join()


def test_one_that_never_ends_is_not_waited_for_longer(monkeypatch):
    monkeypatch.setattr("specdraft.training.gloo.gloo_threads", lambda: ["R"])
    before = time.monotonic()
    wait_for_gloo(0.2)
    assert 0.2 <= time.monotonic() - before < 5
