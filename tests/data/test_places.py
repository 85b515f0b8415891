"""A folder of a disk and a bucket promise the same."""

import threading
import time
from pathlib import Path

import pytest

from specdraft.data.bucket import Bucket
from specdraft.data.places import Folder, Place, open_place


@pytest.fixture(params=["folder", "bucket"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    if request.param == "folder":
        return Folder(tmp_path / "not" / "there")
    return Bucket(f"{request.getfixturevalue('bucket_url')}/not/there", lease=1.0)


def test_files(place):
    assert place.names() == []
    assert place.read("a") is None
    place.save("b", [b"0123", b"4567"])
    place.save("a", [b"x"])
    place.save("a", [b"yy"])
    assert place.names() == ["a", "b"]
    assert (place.size("a"), place.size("b")) == (2, 8)
    assert (place.read("a"), place.read("b")) == (b"yy", b"01234567")
    assert (place.read("b", 0, 3), place.read("b", 3, 5), place.read("b", 6)) == (b"012", b"34", b"67")


def test_what_is_held_is_held_once_and_seen_by_nobody_else(place):
    with place.hold("a", wait=False) as first:
        assert first
        with place.hold("a", wait=False) as second, place.hold("b", wait=False) as other:
            assert (second, other) == (False, True)
        assert place.names() == []
        with place.hold("a", wait=False) as still:
            assert not still
    with place.hold("a", wait=False) as again:
        assert again


def test_who_waits_holds_it_afterwards(place):
    order = []

    def work(name: str) -> None:
        with place.hold("a") as held:
            order.append((name, held))
            time.sleep(0.2)
            order.append((name, held))

    threads = [threading.Thread(target=work, args=(name,)) for name in "xy"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(order) == 4 and all(held for _, held in order)
    assert order[0] == order[1] and order[2] == order[3] and order[0] != order[2]


def test_a_path_or_a_url():
    assert isinstance(open_place("some/folder"), Folder) and str(open_place("some/folder")) == "some/folder"
    assert isinstance(open_place("memory://a/b"), Bucket)


def test_names_that_a_killed_process_held_are_free_once_they_are_forgotten(place):
    with place.hold("train-1") as mine, place.hold("other-1") as theirs:
        assert mine and theirs
        place.forget("train-*")  # nobody looks at train-1 again, as if its holder had been killed
        with place.hold("train-1", wait=False) as again, place.hold("other-1", wait=False) as still:
            assert (again, still) == (True, False)
    with place.hold("train-1", wait=False) as afterwards:
        assert afterwards
