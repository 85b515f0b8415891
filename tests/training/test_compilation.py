import multiprocessing
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from specdraft.training import compilation


@pytest.fixture
def builder(tmp_path, monkeypatch):
    """A builder that compiles as torch does: it waits for a lock file, which it removes at its end."""
    loads = []

    def load():
        lock = tmp_path / "operator" / "lock"
        assert not lock.exists(), "torch would wait for ever"
        lock.touch()
        loads.append(os.getpid())
        lock.unlink()

    made = SimpleNamespace(name="operator", is_compatible=lambda: True, load=load, loads=loads)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    accelerator = SimpleNamespace(create_op_builder=lambda name: made if name == "Builder" else None)
    monkeypatch.setattr("deepspeed.accelerator.get_accelerator", lambda: accelerator)
    return made


def test_the_lock_of_a_killed_process_stops_nobody(builder, tmp_path):
    abandoned = tmp_path / "operator" / "lock"
    abandoned.parent.mkdir()
    abandoned.touch()
    compilation.compile_operator("Builder")
    assert builder.loads == [os.getpid()] and not abandoned.exists()


def test_an_operator_that_is_not_there_or_does_not_fit_is_left_out(builder):
    compilation.compile_operator("Another")
    builder.is_compatible = lambda: False
    compilation.compile_operator("Builder")
    assert builder.loads == []


def _compile(folder: Path) -> None:
    compilation.compile_operator("Builder")
    with (folder / "done").open("a") as file:
        file.write("x")


def test_processes_compile_one_after_the_other(builder, tmp_path):
    fork = multiprocessing.get_context("fork")
    processes = [fork.Process(target=_compile, args=(tmp_path,)) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0] * 4 and (tmp_path / "done").read_text() == "xxxx"
