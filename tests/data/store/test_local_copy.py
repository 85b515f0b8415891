"""A store in a bucket equals one on a disk, and is read from a copy of the node's own."""

import pytest
import torch

from specdraft.data.bucket import Bucket
from specdraft.data.store import Store, StoreWriter
from specdraft.data.store.local_copy import local_copy
from specdraft.errors import UserError


@pytest.fixture
def bucket(bucket_url, monkeypatch, tmp_path):
    monkeypatch.setenv("SPECDRAFT_CACHE", str(tmp_path / "cache"))
    return Bucket(f"{bucket_url}/store", lease=2.0)


def written(making, bucket, **options):
    writer = StoreWriter(bucket, making.contents(**options), making.packed())
    writer.write(making.features, 1)
    return writer


def test_the_same_files_as_on_a_disk(making, bucket):
    making.store()
    writer = written(making, bucket)
    assert bucket.names() == sorted(file.name for file in making.path.iterdir())
    assert all(bucket.read(name) == (making.path / name).read_bytes() for name in bucket.names())
    assert writer.missing() == []


def test_a_claim_that_outlived_its_shard_goes_with_the_last_one(making, bucket):
    whole = making.store().shards["train"][0]
    bucket.upload(making.path / whole, whole)
    bucket._put(f".{whole.rpartition('-')[0]}.claim", "killed 3")
    written(making, bucket)
    assert sorted(bucket._listed()) == sorted(file.name for file in making.path.iterdir())


def test_it_is_read_as_it_was_written(making, bucket):
    written(making, bucket)
    ours, theirs = Store(local_copy(bucket)), making.store()
    for split in ("train", "validation"):
        indices = range(len(theirs.data[split]))
        for mine, other in zip(ours.read(split, indices)[:2], theirs.read(split, indices)[:2], strict=True):
            assert torch.equal(mine.codes, other.codes)


def test_a_copy_is_made_once_and_goes_on_where_it_was(making, bucket, monkeypatch):
    written(making, bucket)
    loaded = []
    download = Bucket.download
    monkeypatch.setattr(Bucket, "download", lambda self, name, file: loaded.append(name) or download(self, name, file))
    folder = local_copy(bucket)
    assert sorted(loaded) == bucket.names()
    loaded.clear()
    first = next(file for file in folder.iterdir() if file.name.startswith("train-0"))
    first.unlink()
    assert local_copy(bucket) == folder
    assert sorted(loaded) == sorted([first.name, "index.json"])


def test_other_ranks_read_the_index_while_one_looks_for_what_is_missing(making, bucket, monkeypatch):
    written(making, bucket)
    folder = local_copy(bucket)
    download, seen = Bucket.download, []

    def watched(self, name, file):
        seen.append((folder / "index.json").is_file())
        return download(self, name, file)

    monkeypatch.setattr(Bucket, "download", watched)
    local_copy(bucket)
    assert seen == [True]


def test_another_store_at_the_same_place_replaces_the_copy(making, bucket):
    written(making, bucket)
    before = {file.name for file in local_copy(bucket).iterdir()}
    for name in bucket.names():
        bucket._files.rm_file(bucket._at(name))
    written(making, bucket, dtype="bfloat16")
    after = {file.name for file in local_copy(bucket).iterdir()}
    assert after == set(bucket.names()) and after & before == {name for name in before if name.endswith("npy")} | {
        "index.json"
    }


def test_refused(making, bucket, monkeypatch):
    with pytest.raises(UserError, match="there is no store at s3://"):
        local_copy(bucket)
    writer = StoreWriter(bucket, making.contents(), making.packed())
    writer._begin()
    with pytest.raises(UserError, match="unfinished"):
        local_copy(bucket)
    writer.write(making.features, 1)
    monkeypatch.setattr("shutil.disk_usage", lambda folder: type("Usage", (), {"free": 10})())
    with pytest.raises(UserError, match=r"needs .* GB more"):
        local_copy(bucket)


def test_a_foreign_or_damaged_shard_is_named(making, bucket):
    written(making, bucket)
    name = next(name for name in bucket.names() if name.startswith("train-00000"))
    whole = bucket.read(name)
    for damaged in (whole[:-4], whole[:5], b"\xff" * 100, b""):
        bucket.save(name, [damaged])
        with pytest.raises(UserError, match="damaged or no shard"):
            StoreWriter(bucket, making.contents(), making.packed()).missing()
    bucket.save(name, [whole])
    other = StoreWriter(bucket, making.contents(dtype="bfloat16"), making.packed())
    with pytest.raises(UserError, match="has dtype=float32"):
        other.missing()
