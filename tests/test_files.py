"""Files are whole or absent, locks are held by one, and names stay in their folder."""

import fcntl
import multiprocessing
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from specdraft.errors import UserError
from specdraft.files import atomic_directory, atomic_file, exclusive, make_directory, member, read_json


def entries(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def interrupted(writing: AbstractContextManager[Path], write: Callable[[Path], object]) -> None:
    with writing as temporary:
        write(temporary)
        raise ValueError("half-way")


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path):
    path = tmp_path / "new" / "file"
    with atomic_file(path) as temporary:
        temporary.write_text("first")
        assert not path.exists()
    with pytest.raises(ValueError, match="half-way"):
        interrupted(atomic_file(path), lambda temporary: temporary.write_text("second"))
    assert path.read_text() == "first" and entries(path.parent) == ["file"]


def test_a_directory_is_replaced_whole_or_not_at_all(tmp_path):
    path = tmp_path / "directory"
    for name in ("a", "b"):
        with atomic_directory(path) as temporary:
            (temporary / name).touch()
    assert entries(path) == ["b"]
    with pytest.raises(ValueError, match="half-way"):
        interrupted(atomic_directory(path), lambda temporary: (temporary / "c").touch())
    assert entries(path) == ["b"] and entries(tmp_path) == ["directory"]


def test_a_full_disk_is_named_with_what_was_to_be_written(tmp_path):
    def fill(*_):
        Path("/dev/full").write_text("more")

    path = tmp_path / "name"
    for write in (atomic_file, atomic_directory):
        with pytest.raises(UserError, match=f"{path} cannot be written .No space left on device.: free some space"):
            interrupted(write(path), fill)
        with pytest.raises(UserError, match=f"{path} cannot be written .File too large.: free some space"):
            interrupted(write(path), lambda _: _too_large_for_safetensors())
    assert entries(tmp_path) == []


def _too_large_for_safetensors():
    raise SafetensorError("Error while serializing: I/O error: File too large (os error 27)")


def test_who_may_read_a_directory_may_read_its_files(tmp_path):
    path = tmp_path / "directory"
    with atomic_directory(path) as temporary:
        save_file({"weight": torch.zeros(2)}, temporary / "model.safetensors")
    usual = tmp_path / "usual"
    usual.touch()
    assert (path / "model.safetensors").stat().st_mode == usual.stat().st_mode


def test_a_directory_that_cannot_be_written(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"cannot write to the directory .*: choose another one"):
        make_directory(tmp_path / "file" / "below")


def _try_lock(path: Path, answer: "multiprocessing.Queue[bool]") -> None:
    with exclusive(path, wait=False) as held:
        answer.put(held)


def test_a_lock_is_held_by_one_process_at_a_time(tmp_path):
    lock = tmp_path / "locks" / "lock"
    spawn = multiprocessing.get_context("fork")

    def other() -> bool:
        answer = spawn.Queue()
        process = spawn.Process(target=_try_lock, args=(lock, answer))
        process.start()
        held = answer.get(timeout=60)
        process.join()
        return held

    with exclusive(lock) as held:
        assert held and not other()
    assert other()


def test_a_lock_on_a_removed_file_is_not_held(tmp_path, monkeypatch):
    """As when the last holder removes the file between our opening and our locking of it."""
    lock, real = tmp_path / "lock", fcntl.flock
    calls = []

    def flock(file, flags):
        real(file, flags)
        calls.append(file)
        if len(calls) == 1:
            lock.unlink()

    monkeypatch.setattr(fcntl, "flock", flock)
    with exclusive(lock) as held:
        assert held and lock.exists() and len(calls) == 2


def test_a_lock_that_another_process_makes_and_removes_meanwhile(tmp_path, monkeypatch):
    """The one who comes after the last holder is done just as we look whose file it is."""
    lock, lock_file, look = tmp_path / "lock", fcntl.flock, os.fstat
    looks = []

    def flock(file, flags):
        lock_file(file, flags)
        if not looks:
            lock.unlink()
            lock.touch()

    def fstat(descriptor):
        looks.append(descriptor)
        if len(looks) == 1:
            lock.unlink()
        return look(descriptor)

    monkeypatch.setattr(fcntl, "flock", flock)
    monkeypatch.setattr(os, "fstat", fstat)
    with exclusive(lock) as held:
        monkeypatch.undo()
        assert held and lock.exists() and len(looks) == 2


def test_json_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(UserError, match="does not exist"):
        read_json(tmp_path / "absent.json")
    for text in (b"{", b"\xff", b"[" * 100_000):
        (tmp_path / "file.json").write_bytes(text)
        with pytest.raises(UserError, match="is not readable JSON"):
            read_json(tmp_path / "file.json")


@pytest.mark.parametrize("name", ["../other", "/etc/passwd", "inside/../../other", "link", "circle", "a\x00b"])
def test_a_name_that_leads_out_of_the_folder(tmp_path, name):
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "link").symlink_to("/etc/passwd")
    (folder / "circle").symlink_to(folder / "circle")
    with pytest.raises(UserError, match="which lies elsewhere"):
        member(folder, name)


def test_a_snapshot_of_the_hub_may_link_to_its_blobs_only(tmp_path):
    snapshot, blobs = tmp_path / "models--a--b" / "snapshots" / "0abc", tmp_path / "models--a--b" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    (blobs / "f00").touch()
    (snapshot / "config.json").symlink_to("../../blobs/f00")
    (snapshot / "other").symlink_to("../../../elsewhere")
    assert member(snapshot, "config.json").is_file()
    with pytest.raises(UserError, match="lies elsewhere"):
        member(snapshot, "other")
