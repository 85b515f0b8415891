"""Shards, journal, manifest: nothing is answered twice, and a killed process leaves what another can go on with."""

import copy
import json
import multiprocessing
import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tqdm import tqdm
from transformers import LlamaForCausalLM

from specdraft.data.regeneration import RegenerationSettings, cache, regenerate
from specdraft.data.sources.base import Conversation
from specdraft.errors import UserError
from specdraft.targets import Target

SETTINGS = RegenerationSettings(temperatures=(0.0, 1.0), max_new_tokens=8, seed=5)
TEMPLATES = Path(__file__).parents[1] / "templates"
FORK = multiprocessing.get_context("fork")


@pytest.fixture(autouse=True)
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "CONVERSATIONS_PER_SHARD", 8)


def run(
    target: Target,
    conversations: Any,
    folder: Path,
    engine: Any,
    settings: Any = SETTINGS,
    room: int = 256,
    max_refused: int = 0,
) -> Any:
    return regenerate(target, conversations, settings, folder, room, "train conversations", engine, max_refused)


def files(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_every_turn_is_answered_once_and_found_again(target: Target, talks: Any, engine: Any, tmp_path: Path) -> None:
    conversations = talks(20)
    done = run(target, conversations, tmp_path, engine)
    assert len(engine.asked) == done.counts.turns == sum(len(c.messages) // 2 for c in conversations)
    outcomes = list(done.outcomes())
    assert [outcome.id for outcome in outcomes] == [c.id for c in conversations]
    assert sum(len(ids) for outcome in outcomes for ids in outcome.answers) == done.counts.tokens
    assert {request.temperature for request in engine.asked} == {0.0, 1.0}
    engine.asked.clear()
    again = run(target, (c for c in conversations), tmp_path, engine)  # lazily, and from the cache
    assert not engine.asked and list(again.outcomes()) == outcomes and again.counts == done.counts
    assert sum(sum(e.loss_mask) for e in again.examples()) == done.counts.tokens
    assert len(done.shards) == 3 and all(name.endswith((".jsonl", ".json")) for name in files(tmp_path))
    manifest = json.loads(done.manifest.read_text())
    assert [shard["conversations"] for shard in manifest["shards"]] == [8, 8, 4]
    assert {shard["engine"] for shard in manifest["shards"]} == {"scripted"}


def test_more_conversations_reuse_the_shards_before_them(
    target: Target, talks: Any, engine: Any, tmp_path: Path
) -> None:
    run(target, talks(16), tmp_path, engine)
    before = len(engine.asked)
    run(target, talks(24), tmp_path, engine)
    assert len(engine.asked) - before == sum(len(c.messages) // 2 for c in talks(24)[16:])


def test_other_settings_conversations_or_targets_are_answered_anew(
    target: Target, talks: Any, engine: Any, tmp_path: Path
) -> None:
    run(target, talks(4), tmp_path, engine)
    torch.manual_seed(9)
    other = Target.from_model(LlamaForCausalLM(target.model.config).double(), target.tokenizer)
    for each, conversations, settings, room in (
        (target, talks(4)[::-1], SETTINGS, 256),
        (target, talks(4), replace(SETTINGS, max_new_tokens=5), 256),
        (target, talks(4), replace(SETTINGS, seed=6), 256),
        (target, talks(4), SETTINGS, 255),
        (other, talks(4), SETTINGS, 256),
    ):
        engine.asked.clear()
        run(each, conversations, tmp_path, engine, settings, room)
        assert engine.asked
    engine.asked.clear()
    run(target, talks(4), tmp_path, engine, replace(SETTINGS, batch_size=7))  # decides nothing but speed
    assert not engine.asked


def test_what_has_no_room_is_counted_or_refused(target: Target, talks: Any, engine: Any, tmp_path: Path) -> None:
    long = Conversation("long", "c", ({"role": "user", "content": "add left " * 300},))
    done = run(target, [*talks(3), long], tmp_path, engine)
    assert done.counts.left_out == 1 and done.counts.conversations == 4
    done = run(target, talks(3), tmp_path, engine)
    assert done.counts.left_out == 0 and isinstance(done.examples(), Iterator) and len(list(done.examples())) >= 3
    with pytest.raises(UserError, match="none of the 1 train conversations fits 256 tokens with 8 of them"):
        run(target, [long], tmp_path, engine)


def test_nothing_is_asked_after_an_answer_that_was_cut(target: Target, talks: Any, engine: Any, tmp_path: Path) -> None:
    conversations = talks(9)  # of one, two and three turns
    done = run(target, conversations, tmp_path, engine, replace(SETTINGS, max_new_tokens=1))
    assert len(engine.asked) == done.counts.turns == done.counts.unfinished == 9
    assert done.counts.dropped == 3 * (0 + 1 + 2) and done.counts.shortened == 0
    assert all(sum(example.loss_mask) == 1 and example.loss_mask[-1] for example in done.examples())


def test_what_the_template_refuses_is_counted_up_to_a_limit(
    target: Target, talks: Any, engine: Any, tmp_path: Path
) -> None:
    """Some templates want users and assistants in turns; shared conversations often break off and go on."""
    strict = copy.copy(target)
    strict.tokenizer = copy.deepcopy(target.tokenizer)
    strict.tokenizer.chat_template = (TEMPLATES / "mistral.jinja").read_text()
    ask, reply = {"role": "user", "content": "add left"}, {"role": "assistant", "content": "total"}
    at_once = Conversation("at once", "c", (ask, ask))
    later = Conversation("later", "c", (ask, reply, ask, ask))
    asked = [*talks(3), at_once, later, *talks(9)]
    with pytest.raises(UserError, match=r"2 of the first 8 train conversations are refused .* \(at once, later\), "):
        run(strict, asked, tmp_path, engine)
    with pytest.raises(UserError, match=r"max_malformed is 1: mend them or raise it; the first: .* roles user, user"):
        run(strict, asked, tmp_path, engine, max_refused=1)
    before = len(engine.asked)
    done = run(strict, asked, tmp_path, engine, max_refused=2)
    assert (done.counts.refused, done.counts.left_out, done.counts.conversations) == (2, 0, 14)
    assert [name for name, _ in done.refused] == ["at once", "later"]
    assert [len(outcome.answers) for outcome in done.outcomes() if outcome.refused] == [0, 1]
    assert len(engine.asked) - before == 12  # of the second shard alone: the first one stayed
    with pytest.raises(UserError, match="1 of the first 1 train conversations"):
        run(strict, [at_once], tmp_path, engine)
    for limit in (2, 100):  # the template is at fault, not the room
        with pytest.raises(UserError, match=r"^the target's chat template cannot render the roles user, user"):
            run(strict, [at_once, replace(at_once, id="again")], tmp_path, engine, max_refused=limit)
    assert run(strict, [later], tmp_path, engine, max_refused=1).counts.turns == 1  # what came before is kept
    long = Conversation("long", "c", ({"role": "user", "content": "add left " * 300},))
    with pytest.raises(UserError, match="none of the 1 train conversations fits 256 tokens"):
        run(strict, [at_once, long], tmp_path, engine, max_refused=1)


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


def start(*args: Any) -> Any:
    tqdm.set_lock(threading.RLock())  # tqdm's own is shared with forks, and a killed one would never let go of it
    process = FORK.Process(target=run, args=args)
    process.start()
    return process


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
