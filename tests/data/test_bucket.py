"""A bucket on a server that speaks S3: claims, downloads and refusals. What it shares with a folder: test_places.py."""

import threading
import time

import pytest

from specdraft.data.bucket import Bucket, is_url
from specdraft.errors import UserError

LEASE = 1.0  # seconds


def test_a_claim_that_is_renewed_lasts_longer_than_a_lease(bucket_url):
    bucket, taken = Bucket(bucket_url, lease=LEASE), threading.Event()

    def wait() -> None:
        with Bucket(bucket_url, lease=LEASE).hold("a") as held:
            assert held
            taken.set()

    thread = threading.Thread(target=wait)
    with bucket.hold("a"):
        thread.start()
        assert not taken.wait(3 * LEASE)
    assert taken.wait(10)
    thread.join()


def test_a_claim_of_the_dead_is_taken_over(bucket_url):
    bucket = Bucket(bucket_url, lease=LEASE)
    bucket._put(".a.claim", "somebody 7")
    with bucket.hold("a", wait=False) as held:
        assert not held
    started = time.monotonic()
    with bucket.hold("a") as held:
        assert held
    assert time.monotonic() - started > LEASE
    assert bucket.read(".a.claim") is None


def test_of_two_that_take_over_one_holds_it(bucket_url):
    Bucket(bucket_url)._put(".a.claim", "somebody 7")
    inside, most = [], []

    def work() -> None:
        with Bucket(bucket_url, lease=LEASE).hold("a"):
            inside.append(1)
            most.append(len(inside))
            time.sleep(0.3)
            inside.pop()

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1, 1, 1]


def test_downloads_are_whole_or_absent(bucket_url, tmp_path):
    bucket = Bucket(bucket_url)
    bucket.save("a", [b"abc"])
    assert bucket.download("a", tmp_path / "a") and (tmp_path / "a").read_bytes() == b"abc"
    assert not bucket.download("b", tmp_path / "b")
    assert [file.name for file in tmp_path.iterdir()] == ["a"]
    assert (bucket.exists("a"), bucket.exists("b")) == (True, False)


def test_a_client_that_cannot_write_conditionally_looks_first(bucket_url, monkeypatch):
    bucket = Bucket(bucket_url, lease=LEASE)
    write = bucket._files.pipe_file

    def plain(path: str, value: bytes) -> None:
        write(path, value)

    monkeypatch.setattr(bucket._files, "pipe_file", plain)
    with bucket.hold("a", wait=False) as held, bucket.hold("a", wait=False) as again:
        assert (held, again) == (True, False)


@pytest.mark.parametrize(("url", "said"), [("nothing://a/b", "pip install"), ("s3://absent/a", "cannot write to")])
def test_refusals_are_one_sentence(url, said, bucket_url):
    with pytest.raises(UserError, match=said):
        Bucket(url).save("a", [b"a"])


def test_what_is_a_url():
    assert is_url("s3://a/b") and not is_url("/a/b") and not is_url("a:b")
    assert str(Bucket("memory://a/b/")) == "memory://a/b"
