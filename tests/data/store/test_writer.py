"""Written by any number of processes, killed and continued: the same files."""

import itertools
import json
import math
import multiprocessing
import random
import shutil
import signal
import time

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from specdraft.data.store import Store
from specdraft.data.store.contents import INDEX
from specdraft.errors import UserError
from tests.data.store.conftest import packed
from tests.data.store.written import files


def test_a_shard_is_what_an_independent_reader_finds_there(making):
    store = making.store()
    name = store.shards["train"][1]
    tensors = load_file(making.path / name)
    per_shard = store.contents.sequences_per_shard
    rows = making.batches["train"]
    here = slice(per_shard, 2 * per_shard)
    expected = making.features(rows.input_ids[here], rows.position_ids[here])
    torch.testing.assert_close(tensors["aux"].flatten(-2), expected.aux)
    torch.testing.assert_close(tensors["last"].view(per_shard, 32, 32), expected.last)
    with safe_open(making.path / name, framework="pt") as file:
        about = json.loads(file.metadata()["specdraft"])
    assert (about["store"], about["split"], about["shard"]) == (store.contents.fingerprint, "train", 1)


@pytest.mark.parametrize(("dtype", "worst"), [("float32", 0.0), ("bfloat16", 2**-8), ("float8", 2**-4)])
def test_the_error_reported_is_the_error_made(making, dtype, worst):
    store = making.store(dtype=dtype)
    sums = {"aux": [0.0, 0.0], "last": [0.0, 0.0]}
    for split, rows in making.batches.items():
        exact = making.features(rows.input_ids, rows.position_ids)
        found = store.read(split, range(len(rows.input_ids))).decode(torch.float32)
        for name, total in sums.items():
            total[0] += (getattr(found, name).double() - getattr(exact, name)).square().sum().item()
            total[1] += getattr(exact, name).double().square().sum().item()
    for name, (difference, square) in sums.items():
        assert store.relative_error[name] == pytest.approx(math.sqrt(difference / square), rel=1e-3, abs=1e-6)
        assert store.relative_error[name] <= worst


def test_several_processes_write_what_one_writes(making, tmp_path):
    making.batches["train"] = packed(60, seed=3)
    shared = {"shard_bytes": 1}  # a sequence per shard
    making.store(**shared)
    path, fork = tmp_path / "shared", multiprocessing.get_context("fork")
    counts, together = [fork.Value("i", 0) for _ in range(3)], fork.Barrier(3)

    def write(process: int) -> None:
        def counted(input_ids, position_ids):
            if not counts[process].value:
                together.wait(60)  # each has a shard of its own
            counts[process].value += 1
            time.sleep(0.002)
            return making.features(input_ids, position_ids)

        making.writer(path, **shared).write(counted, 1)
        assert len(Store(path).shards["train"]) > 10  # complete when any of them ends

    processes = [fork.Process(target=write, args=(number,)) for number in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        assert process.exitcode == 0
    # Nothing was computed twice.
    assert sum(count.value for count in counts) == sum(len(batch.input_ids) for batch in making.batches.values())
    assert files(path) == files(making.path)


def test_ten_kills_at_random_moments_lose_and_repeat_nothing(making, tmp_path):
    making.batches["train"] = packed(200, seed=3)
    shared = {"shard_bytes": 1}  # a sequence per shard
    making.store(**shared)
    path = tmp_path / "killed"

    moments, fork = random.Random(0), multiprocessing.get_context("fork")

    def write(last: int, reached) -> None:
        rows = itertools.count(1)

        def slowly(input_ids, position_ids):
            if next(rows) == last:
                reached.set()
            time.sleep(0.002)
            return making.features(input_ids, position_ids)

        making.writer(path, **shared).write(slowly, 1)

    for _ in range(10):
        # The moment is counted in sequences, because a busy machine's seconds are no measure of work.
        reached = fork.Event()
        child = fork.Process(target=write, args=(moments.randint(2, 8), reached))
        child.start()
        reached.wait()
        time.sleep(moments.uniform(0, 0.01))
        child.kill()
        child.join()
        assert child.exitcode == -signal.SIGKILL
    before = {name: (path / name).stat().st_mtime_ns for name in files(path) if name.endswith(".safetensors")}
    assert 10 <= len(before) < 200
    making.writer(path, **shared).write(making.features, 1)
    left = {name: content for name, content in files(path).items() if not name.startswith(".index.json")}
    assert left == files(making.path)
    assert all((path / name).stat().st_mtime_ns == moment for name, moment in before.items())


def test_a_lock_that_outlived_its_shard_goes_with_the_last_one(making, tmp_path):
    index = making.store()
    path = tmp_path / "killed"
    path.mkdir()
    whole = index.shards["train"][0]
    shutil.copy(making.path / whole, path)
    (path / f".{whole.rpartition('-')[0]}.lock").touch()
    making.writer(path).write(making.features, 1)
    assert files(path) == files(making.path)


def test_others_write_what_a_killed_process_leaves(making, tmp_path):
    making.batches["train"] = packed(60, seed=3)
    shared = {"shard_bytes": 1}
    making.store(**shared)
    path, fork = tmp_path / "shared", multiprocessing.get_context("fork")
    started = [fork.Event(), fork.Event()]

    def write(process: int, seconds: float) -> None:
        def slowly(input_ids, position_ids):
            started[process].set()
            time.sleep(seconds)
            return making.features(input_ids, position_ids)

        making.writer(path, **shared).write(slowly, 1)

    killed, other = (fork.Process(target=write, args=(each, seconds)) for each, seconds in ((0, 60.0), (1, 0.001)))
    killed.start()
    started[0].wait()
    other.start()  # both write; the other one waits for the shard of the first in the end
    started[1].wait()
    with pytest.raises(UserError, match="is unfinished"):
        Store(path)
    killed.kill()
    for process, status in ((killed, -signal.SIGKILL), (other, 0)):
        process.join()
        assert process.exitcode == status
    assert files(path) == files(making.path)


def test_a_finished_store_is_not_written_again(making):
    making.store()
    before = files(making.path)

    def never(*_):
        raise AssertionError("nothing was missing")

    assert making.writer().missing() == []
    making.writer().write(never, 1)
    assert files(making.path) == before


def test_another_store_in_its_place_is_refused(making):
    making.store()
    for act in (lambda writer: writer.write(making.features, 1), lambda writer: writer.check_disk()):
        with pytest.raises(UserError, match=r"has dtype=float32, and this would write bfloat16: choose another path"):
            act(making.writer(dtype="bfloat16"))
    making.settings = {"limit": 30, "source": {"name": "random"}}
    with pytest.raises(UserError, match=r"has settings\.limit=20, and this would write 30"):
        making.writer().missing()


def test_a_foreign_shard_is_refused(making, tmp_path):
    making.store()
    other = making.store(tmp_path / "other", dtype="bfloat16")
    (making.path / INDEX).unlink()
    name = other.shards["train"][0]
    shutil.copy(tmp_path / "other" / name, making.path)
    with pytest.raises(UserError, match=f"{name} belongs to another store"):
        making.writer().write(making.features, 1)


def test_the_disk_is_checked_before_anything_is_written(making, monkeypatch):
    writer = making.writer()
    total = writer.contents.bytes()
    writer.check_disk(total)
    with pytest.raises(UserError, match=r"the store takes .* GB, the limit is .* GB: raise max_gb"):
        writer.check_disk(total - 1)
    usage = shutil.disk_usage(making.path.parent)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage._replace(free=total - 1))
    with pytest.raises(UserError, match=r"needs .* GB more, the disk of .* GB free"):
        writer.check_disk()
    assert not making.path.exists()
    monkeypatch.undo()
    writer.write(making.features, 1)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage._replace(free=0))
    writer.check_disk()  # nothing is missing


def test_states_that_are_not_finite_are_refused(making):
    def broken(input_ids, position_ids):
        features = making.features(input_ids, position_ids)
        return features._replace(aux=features.aux * torch.inf)

    with pytest.raises(UserError, match="not finite in sequences 0 to 0 of the train split"):
        making.writer().write(broken, 1)
