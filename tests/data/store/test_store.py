"""Written by any number of ranks, killed and continued, read in any order; whatever is not right is named."""

import itertools
import json
import math
import multiprocessing
import pickle
import random
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from specdraft.data.store import Store, reader
from specdraft.data.store.contents import INDEX
from specdraft.data.store.rows import asked
from specdraft.errors import UserError
from tests.data.store.conftest import packed


def files(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.iterdir()}


def is_mapped(tensor: torch.Tensor, file: Path) -> bool:
    """Whether the tensor is the file's own bytes, as far as the system can tell."""
    maps = Path("/proc/self/maps")
    if not maps.exists():
        return True
    places = [line.split()[0].split("-") for line in maps.read_text().splitlines() if line.endswith(str(file))]
    return any(int(begin, 16) <= tensor.data_ptr() < int(end, 16) for begin, end in places)


def test_rows_come_back_in_any_order(making):
    store = making.store()
    assert len(store.shards["train"]) > 3
    for split, rows in making.rows.items():
        for name, value in vars(rows).items():
            assert torch.equal(getattr(store.rows[split].whole(), name), value)
        expected = [making.features(rows.input_ids[i : i + 1], rows.position_ids[i : i + 1]) for i in range(len(value))]
        for order in ([0], [1, 0, 1], list(range(len(value)))[::-1]):
            found = store.read(split, order, torch.float32)
            assert torch.equal(found.aux, torch.cat([expected[i].aux for i in order]))
            assert torch.equal(found.last, torch.cat([expected[i].last for i in order]))


def test_a_store_goes_to_another_process_without_its_mapped_shards(making):
    store = making.store()
    expected = store.read("train", [3, 0], torch.float32)
    sent = pickle.dumps(store)
    assert len(sent) < store.contents.bytes() / 4
    found = pickle.loads(sent).read("train", [3, 0], torch.float32)
    assert torch.equal(found.aux, expected.aux) and torch.equal(found.last, expected.last)


def test_few_shards_stay_mapped_and_every_row_is_still_read(making, monkeypatch):
    store = making.store()
    order = range(len(making.rows["train"].input_ids))
    expected = store.read("train", order, torch.float32)
    assert len(store._mapped) > 3
    monkeypatch.setattr(reader, "_MAX_MAPPED", 2)
    frugal = Store(making.path)
    for _ in range(2):
        assert torch.equal(frugal.read("train", order, torch.float32).aux, expected.aux)
        assert len(frugal._mapped) == 2


def test_a_shard_is_what_an_independent_reader_finds_there(making):
    store = making.store()
    name = store.shards["train"][1]
    tensors = load_file(making.path / name)
    per_shard = store.contents.rows_per_shard
    rows = making.rows["train"]
    here = slice(per_shard, 2 * per_shard)
    expected = making.features(rows.input_ids[here], rows.position_ids[here])
    torch.testing.assert_close(tensors["aux"].flatten(-2), expected.aux)
    torch.testing.assert_close(tensors["last"].view(per_shard, 32, 32), expected.last)
    with safe_open(making.path / name, framework="pt") as file:
        about = json.loads(file.metadata()["specdraft"])
    assert (about["store"], about["split"], about["shard"]) == (store.contents.fingerprint, "train", 1)


def test_rows_are_what_an_independent_reader_finds_there_and_stay_on_disk(making):
    store, rows = making.store(), making.rows["train"]
    file = making.path / store.contents.splits["train"].file
    ids, positions, documents = load_file(file)["rows"].unbind(1)
    assert torch.equal(torch.where(ids < 0, ~ids, ids), rows.input_ids.int())
    assert torch.equal(ids < 0, rows.loss_mask)
    assert torch.equal(positions, rows.position_ids.int()) and torch.equal(documents, rows.document_ids.int())
    for each in (store, pickle.loads(pickle.dumps(store))):
        assert torch.equal(each.rows["train"].whole().input_ids, rows.input_ids)
        assert is_mapped(each.rows["train"].tensor, file)


@pytest.mark.parametrize(("dtype", "worst"), [("float32", 0.0), ("bfloat16", 2**-8), ("float8", 2**-4)])
def test_the_error_reported_is_the_error_made(making, dtype, worst):
    store = making.store(dtype=dtype)
    sums = {"aux": [0.0, 0.0], "last": [0.0, 0.0]}
    for split, rows in making.rows.items():
        exact = making.features(rows.input_ids, rows.position_ids)
        found = store.read(split, range(len(rows.input_ids)), torch.float32)
        for name, total in sums.items():
            total[0] += (getattr(found, name).double() - getattr(exact, name)).square().sum().item()
            total[1] += getattr(exact, name).double().square().sum().item()
    for name, (difference, square) in sums.items():
        assert store.relative_error[name] == pytest.approx(math.sqrt(difference / square), rel=1e-3, abs=1e-6)
        assert store.relative_error[name] <= worst


@pytest.mark.parametrize("dtype", ["float32", "float8"])
def test_only_what_teaches_is_kept_and_the_rest_is_nan(making, dtype):
    whole, part = making.store(dtype=dtype), making.store(making.path / "part", every_last=False, dtype=dtype)
    assert part.contents.bytes() < whole.contents.bytes()
    for split, rows in making.rows.items():
        order = list(range(len(rows.input_ids)))[::-1]
        kept = asked(rows, every_last=False)[order]
        complete, found = (store.read(split, order, torch.float32) for store in (whole, part))
        assert torch.equal(found.aux, complete.aux)
        assert torch.equal(found.last[kept], complete.last[kept])
        assert found.last[~kept].isnan().all()
        assert 0 < kept.sum() < kept.numel()


def test_a_store_without_auxiliary_layers(making):
    writer = making.writer(layers=())
    assert writer.write(lambda ids, positions: making.target.features(ids, positions, ()), 2)
    found = Store(making.path).read("train", [1], torch.float32)
    assert found.aux.shape == (1, 32, 0)
    assert found.last.shape == (1, 32, 32)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8"])
@pytest.mark.parametrize("every_last", [True, False])
def test_the_bytes_that_are_announced_are_written(making, dtype, every_last):
    store = making.store(dtype=dtype, every_last=every_last)
    tensors = [t for names in store.shards.values() for name in names for t in load_file(making.path / name).values()]
    assert sum(tensor.nbytes for tensor in tensors) == store.contents.bytes()


# --- writing ------------------------------------------------------------------------------------------------------


def test_several_ranks_write_what_one_writes(making, tmp_path):
    making.store()
    ranks = [making.writer(tmp_path / "ranks", rank, 3) for rank in (2, 0, 1)]
    assert [writer.write(making.features, 1) for writer in ranks] == [False, False, True]
    assert files(tmp_path / "ranks") == files(making.path)


def test_ten_kills_at_random_moments_lose_and_repeat_nothing(making, tmp_path):
    making.rows["train"] = packed(200, seed=3)
    shared = {"shard_bytes": 1}  # a row per shard
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
        # The moment is counted in rows, because a busy machine's seconds are no measure of work.
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
    assert making.writer(path, **shared).write(making.features, 1)
    left = {name: content for name, content in files(path).items() if not name.startswith(".index.json")}
    assert left == files(making.path)
    assert all((path / name).stat().st_mtime_ns == moment for name, moment in before.items())


def test_a_rank_that_is_killed_leaves_its_share_and_nothing_else_to_do(making, tmp_path):
    making.rows["train"] = packed(60, seed=3)
    shared = {"shard_bytes": 1}
    making.store(**shared)
    path, fork = tmp_path / "ranks", multiprocessing.get_context("fork")
    started = [fork.Event(), fork.Event()]

    def write(rank: int, seconds: float) -> None:
        def slowly(input_ids, position_ids):
            started[rank].set()
            time.sleep(seconds)
            return making.features(input_ids, position_ids)

        making.writer(path, rank, 2, **shared).write(slowly, 1)

    killed, other = (fork.Process(target=write, args=(rank, seconds)) for rank, seconds in ((0, 0.02), (1, 0.001)))
    killed.start()
    started[0].wait()
    other.start()  # both write
    started[1].wait()
    time.sleep(0.05)
    killed.kill()
    for process, status in ((killed, -signal.SIGKILL), (other, 0)):
        process.join()
        assert process.exitcode == status
    assert {shard.number % 2 for shard in making.writer(path, **shared).missing()} == {0}
    with pytest.raises(UserError, match="is unfinished"):
        Store(path)
    assert making.writer(path, 0, 2, **shared).write(making.features, 1)
    assert files(path) == files(making.path)


def test_a_finished_store_is_not_written_again(making):
    making.store()
    before = files(making.path)

    def never(*_):
        raise AssertionError("nothing was missing")

    assert making.writer().missing() == []
    assert making.writer().write(never, 1)
    assert files(making.path) == before


def test_two_processes_of_one_rank_are_refused(making):
    def nested(input_ids, position_ids):
        with pytest.raises(UserError, match="another process writes the store"):
            making.writer().write(making.features, 1)
        return making.features(input_ids, position_ids)

    assert making.writer().write(nested, 4)


def test_another_store_in_its_place_is_refused(making):
    making.store()
    with pytest.raises(UserError, match=r"has dtype=float32, and this would write bfloat16: choose another path"):
        making.writer(dtype="bfloat16").write(making.features, 1)
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

    with pytest.raises(UserError, match="not finite in rows 0 to 0 of the train split"):
        making.writer().write(broken, 1)


# --- reading ------------------------------------------------------------------------------------------------------


def test_no_store_and_an_unfinished_one_are_named(making):
    with pytest.raises(UserError, match="there is no store at"):
        Store(making.path)
    assert not making.writer(rank=0, world_size=2).write(making.features, 1)
    with pytest.raises(UserError, match=r"is unfinished: run specdraft store again"):
        Store(making.path)


def test_a_missing_shard_is_named_and_written_again(making):
    name = making.store().shards["train"][1]
    (making.path / name).unlink()
    with pytest.raises(UserError, match=f"lacks 1 of its files, {name} among them"):
        Store(making.path)
    making.store()
    assert (making.path / name).exists()


@pytest.mark.parametrize("damage", ["flip", "cut", "empty"])
def test_a_damaged_shard_is_named_when_it_is_touched(making, damage):
    store = making.store()
    name = store.shards["train"][1]
    content = bytearray((making.path / name).read_bytes())
    content[-5] ^= 1
    changed = {"flip": content, "cut": content[:-100], "empty": b""}[damage]
    (making.path / name).write_bytes(changed)
    store = Store(making.path)
    store.read("train", [0], torch.float32)
    with pytest.raises(UserError, match=f"{name} is damaged: its checksum is"):
        store.read("train", [store.contents.rows_per_shard], torch.float32)


def test_damaged_rows_and_a_damaged_index_are_named(making):
    store = making.store()
    rows = making.path / store.contents.splits["train"].file
    content = bytearray(rows.read_bytes())
    rows.write_bytes(content[:-1] + b"\7")
    with pytest.raises(UserError, match=r"train-rows-.* is damaged"):
        Store(making.path)
    rows.write_bytes(content)
    index = (making.path / INDEX).read_text()
    for changed in (index.replace('"rows_per_shard": 2', '"rows_per_shard": 3'), '{"version": 1}', "[]"):
        assert changed != index
        (making.path / INDEX).write_text(changed)
        with pytest.raises(UserError, match=r"index\.json is damaged or of another version"):
            Store(making.path)
    (making.path / INDEX).write_text(index[:-20])
    with pytest.raises(UserError, match=r"index\.json is not readable JSON"):
        Store(making.path)


@pytest.mark.parametrize("name", ["document_ids", "position_ids"])
def test_rows_that_cannot_be_are_named(making, name):
    getattr(making.rows["train"], name)[3] -= 40
    making.writer().write(making.features, 1)
    with pytest.raises(UserError, match=r"train-rows-.* holds what are no rows"):
        Store(making.path)


def test_another_target_tokenizer_or_data_is_refused(making):
    store, target = making.store(), making.target
    store.check(target, making.settings)
    with pytest.raises(UserError, match=r"was written with data\.source\.name=random, and this run has other"):
        store.check(target, {"limit": 20, "source": {"name": "other"}})
    weight = next(target.model.parameters())
    weight.data += 1
    other = type(target).from_model(target.model, name="changed")
    with pytest.raises(UserError, match="belongs to the target 'tiny', whose configuration or weights are not those"):
        store.check(other, making.settings)

    class Tokenizer:
        chat_template = "{{ messages }}"

        def get_vocab(self):
            return {"a": 0}

    target.tokenizer = Tokenizer()
    with pytest.raises(UserError, match="another tokenizer or chat template"):
        store.check(target, making.settings)
