"""A file is read once on a node, until it changes; who is killed meanwhile leaves it to the others."""

import multiprocessing
import os
import signal
import tempfile
import time
from pathlib import Path

import pytest

from specdraft.data.store import Store, verification
from specdraft.errors import UserError
from specdraft.text import fingerprint


@pytest.fixture(autouse=True)
def temporary(tmp_path, monkeypatch):
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    return tmp_path / "temporary"


@pytest.fixture
def hashed(tmp_path, monkeypatch):
    """Names of the files that were read, by whatever process."""
    notes, read = tmp_path / "hashed", verification.file_fingerprint

    def noted(file: Path) -> str:
        with notes.open("a") as opened:
            opened.write(f"{file.name}\n")
        return read(file)

    monkeypatch.setattr(verification, "file_fingerprint", noted)
    return lambda: notes.read_text().splitlines()


def read_all(store: Store) -> None:
    for split, data in store.data.items():
        store.read(split, range(len(data)))


def test_ranks_that_come_together_read_each_file_once(making, hashed):
    making.store()
    fork = multiprocessing.get_context("fork")
    ranks = [fork.Process(target=lambda: read_all(Store(making.path))) for _ in range(3)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(30)
    assert [rank.exitcode for rank in ranks] == [0, 0, 0]
    read_all(Store(making.path))  # another run
    files = [file.name for file in making.path.iterdir() if file.name != "index.json"]
    assert sorted(hashed()) == sorted(files)


def test_a_file_that_changes_is_read_again(tmp_path, temporary, hashed):
    content = b"as it was written"
    file = tmp_path / f"train-00000-{fingerprint(content)}.safetensors"
    file.write_bytes(content)
    for _ in range(2):
        verification.verify(file, "restore it")
    known = file.stat()
    file.write_bytes(b"As it was written")
    os.utime(file, ns=(known.st_atime_ns, known.st_mtime_ns))  # size and time of modification are the same
    for _ in range(2):
        with pytest.raises(UserError, match=r"is damaged: its checksum is .*; restore it"):
            verification.verify(file, "restore it")
    assert len(hashed()) == 3
    (folder,) = temporary.iterdir()
    assert len(list(folder.glob("*"))) == 2 and folder.stat().st_mode & 0o077 == 0


def test_a_killed_process_leaves_it_to_the_others(tmp_path, monkeypatch, hashed):
    file = tmp_path / f"train-00000-{fingerprint(b'whole')}.safetensors"
    file.write_bytes(b"whole")
    with monkeypatch.context() as forever:
        forever.setattr(
            verification, "file_fingerprint", lambda file: (file.with_suffix(".on").touch(), time.sleep(60))
        )
        process = multiprocessing.get_context("fork").Process(target=verification.verify, args=(file, ""))
        process.start()
    while not file.with_suffix(".on").exists():
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.join(30)
    verification.verify(file, "")
    assert hashed() == [file.name]


def test_a_folder_of_somebody_else_is_not_believed(tmp_path, monkeypatch):
    verification._folder()
    own = os.getuid()
    folder = verification._folder()
    folder.rename(folder.with_name(f"specdraft-verified-{own + 1}"))
    monkeypatch.setattr(os, "getuid", lambda: own + 1)
    with pytest.raises(UserError, match="belongs to another user"):
        verification._folder()
