"""A killed process leaves what another can go on with; processes share the shards."""

import os
import random
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specdraft.data.regeneration import cache
from specdraft.errors import UserError
from specdraft.targets import Target
from tests.data.regeneration.answering import FORK, files, run, start


@pytest.fixture(autouse=True)
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "CONVERSATIONS_PER_SHARD", 8)


def test_a_file_that_moves_is_not_answered_again(target: Target, talks: Any, engine: Any, tmp_path: Path) -> None:
    run(target, talks(9), tmp_path, engine)
    engine.asked.clear()
    run(target, [replace(each, id=f"elsewhere/{each.id}") for each in talks(9)], tmp_path, engine)
    assert not engine.asked


@pytest.mark.parametrize("torn", [b"", b"[0,3,[1,", b"[0,3,[1,2]]", b"\0\0\0\n"])
def test_an_interrupted_shard_goes_on_from_its_journal(
    target: Target, talks: Any, engine: Any, tmp_path: Path, torn: bytes
) -> None:
    run(target, talks(8), tmp_path / "whole", engine)
    total, real = len(engine.asked), engine.answer

    def interrupted(*args: Any) -> list[int]:
        if len(engine.asked) == total + 11:
            raise KeyboardInterrupt
        return real(*args)

    engine.answer = interrupted
    with pytest.raises(KeyboardInterrupt):
        run(target, talks(8), tmp_path / "cut", engine)
    (journal,) = tmp_path.joinpath("cut").rglob("*.partial.jsonl")
    assert len(journal.read_bytes().splitlines()) == 10
    with journal.open("ab") as file:
        file.write(torn)
    engine.answer = real
    engine.asked.clear()
    run(target, talks(8), tmp_path / "cut", engine)
    assert len(engine.asked) == total - 10
    assert files(tmp_path / "cut") == files(tmp_path / "whole")


@pytest.mark.parametrize("damage", [lambda b: b[:40], lambda b: b[:-5], lambda b: b.replace(b"FILE:1", b"FILE:7")])
def test_a_damaged_shard_is_named(target: Target, talks: Any, engine: Any, tmp_path: Path, damage: Any) -> None:
    (shard,) = run(target, talks(4), tmp_path, engine).shards
    shard.path.write_bytes(damage(shard.path.read_bytes()))
    with pytest.raises(UserError, match=f"{shard.path.name} are damaged: delete that file"):
        run(target, talks(4), tmp_path, engine)


def slowly(engine: Any, seconds: float) -> Any:
    real = engine.answer

    def answer(*args: Any) -> list[int]:
        time.sleep(seconds)
        return real(*args)

    engine.answer = answer
    return engine


def test_ten_kills_at_random_moments_change_nothing(target: Target, talks: Any, engine: Any, tmp_path: Path) -> None:
    conversations, chance = talks(30), random.Random(0)
    run(target, conversations, tmp_path / "whole", engine)
    slowly(engine, 0.01)
    killed = 0
    while killed < 10:
        process = start(target, conversations, tmp_path / "killed", engine)
        process.join(chance.uniform(0.02, 0.25))
        if process.exitcode is not None:  # it was faster than ten kills: from the start again
            assert process.exitcode == 0
            assert files(tmp_path / "killed") == files(tmp_path / "whole")
            (tmp_path / "killed").rename(tmp_path / f"done-{killed}")
            continue
        process.kill()
        process.join()
        assert process.exitcode in (0, -signal.SIGKILL)  # it may have ended just before
        killed += process.exitcode != 0
    run(target, conversations, tmp_path / "killed", engine)
    left = {name: data for name, data in files(tmp_path / "killed").items() if not name.endswith(".tmp")}
    assert left == files(tmp_path / "whole")


def test_processes_share_the_shards(target: Target, talks: Any, engine: Any, tmp_path: Path) -> None:
    conversations = talks(40)
    run(target, conversations, tmp_path / "whole", engine)
    marks = FORK.SimpleQueue()
    real = engine.answer

    def answer(*args: Any) -> list[int]:
        time.sleep(0.01)
        marks.put(os.getpid())
        return real(*args)

    engine.answer = answer
    workers = [start(target, conversations, tmp_path / "shared", engine) for _ in range(2)]
    for worker in workers:
        worker.join()
        assert worker.exitcode == 0
    asked = [marks.get() for _ in range(sum(len(c.messages) // 2 for c in conversations))]
    assert marks.empty() and set(asked) == {worker.pid for worker in workers}
    assert files(tmp_path / "shared") == files(tmp_path / "whole")
