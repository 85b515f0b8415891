"""A folder of object storage, such as S3 or GCS, through fsspec: what machines share that have no disk in common.

An object is whole or absent, but nothing is locked. A *claim* is an object that its holder writes again every few
seconds; one that stays as it is was left by a process that died, and is taken over. Clocks of machines are never
compared. Should a process have slept for longer than that and wake up, two hold one name: both write equal files, as
what is made here depends on its name alone, and only time is lost."""

import tempfile
import threading
import time
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from fnmatch import fnmatch
from itertools import count
from pathlib import Path
from typing import Any

from specdraft.errors import UserError
from specdraft.files import atomic_file
from specdraft.redaction import redact_text
from specdraft.text import reason

LEASE = 60.0  # seconds that a claim which nobody renews is respected


def is_url(path: str) -> bool:
    """Whether ``path`` is of a bucket: ``s3://NAME/FOLDER``, ``gs://NAME/FOLDER``, and whatever else fsspec reads."""
    return "://" in path


class Bucket:
    """The folder of a bucket at ``url``; credentials and the endpoint are found where the storage's own tools find
    them. A claim that is not renewed for ``lease`` seconds is taken over."""

    def __init__(self, url: str, lease: float = LEASE) -> None:
        """Nothing is asked of the bucket yet. Raises UserError for a protocol that is unknown or not installed."""
        import fsspec  # type: ignore[import-untyped]  # imports the storage's client

        self.url, self.lease = url.rstrip("/"), lease
        try:
            self._files: Any
            self._files, self._root = fsspec.core.url_to_fs(self.url)
        except (ImportError, ValueError) as error:
            mend = "pip install 'specdraft[s3]' for s3://, 'specdraft[gcs]' for gs://, or the package it names"
            raise UserError(f"{self} cannot be opened ({reason(error)}): {mend}") from error

    def __str__(self) -> str:
        return redact_text(self.url)

    def names(self) -> list[str]:
        """As ``Place``."""
        return sorted(name for name in self._listed() if not name.startswith("."))

    def size(self, name: str) -> int:
        """As ``Place``."""
        with self._talking("read"):
            return int(self._files.size(self._at(name)))

    def exists(self, name: str) -> bool:
        """Whether the object is there."""
        with self._talking("read"):
            self._files.invalidate_cache()
            return bool(self._files.exists(self._at(name)))

    def free(self) -> None:
        """As ``Place``: nobody counts."""
        return

    def read(self, name: str, first: int = 0, stop: int | None = None) -> bytes | None:
        """As ``Place``."""
        with self._talking("read"), suppress(FileNotFoundError):
            return bytes(self._files.cat_file(self._at(name), start=first or None, end=stop))
        return None

    def save(self, name: str, parts: Iterable[bytes]) -> None:
        """As ``Place``. Collected in a temporary file first: an upload that is cut off leaves no object."""
        with tempfile.NamedTemporaryFile(prefix="specdraft-") as file:
            file.writelines(parts)
            file.flush()
            self.upload(Path(file.name), name)

    def upload(self, file: Path, name: str) -> None:
        """Write a file of this machine under that name."""
        with self._talking("write to"):
            self._files.put_file(str(file), self._at(name))

    def download(self, name: str, file: Path) -> bool:
        """Write an object to a file of this machine, whole or not at all; False if it is not there."""
        with self._talking("read"), suppress(FileNotFoundError), atomic_file(file) as temporary:
            self._files.get_file(self._at(name), str(temporary))
            return True
        return False

    @contextmanager
    def hold(self, name: str, *leftovers: str, wait: bool = True) -> Iterator[bool]:
        """As ``Place``; nothing is ever half written here."""
        claim, own = f".{name}.claim", uuid.uuid4().hex
        held = self._take(claim, own, wait)
        released = threading.Event()
        renewing = threading.Thread(target=self._renew, args=(claim, own, released), daemon=True)
        if held:
            renewing.start()
        try:
            yield held
        finally:
            released.set()
            if held:
                renewing.join()
                self._release(claim, own)

    def forget(self, *patterns: str) -> None:
        """As ``Place``. A holder that is alive writes its claim again and releases it."""
        for name in self._listed():
            if any(fnmatch(name, f".{pattern}.claim") for pattern in patterns):
                self._remove(name)

    def _take(self, claim: str, own: str, wait: bool) -> bool:
        """Whether the claim is ours: it was free, or nobody has renewed it for as long as we looked at it."""
        seen, since = None, time.monotonic()
        while not self._create(claim, f"{own} 0"):
            if not wait:
                return False
            found = self.read(claim)
            if found != seen:
                seen, since = found, time.monotonic()
            elif found is not None and time.monotonic() - since > self.lease:
                self._put(claim, f"{own} 0")
                time.sleep(self.lease / 20)  # another one may be taking it over at this moment: the last one has it
                if (self.read(claim) or b"").startswith(own.encode()):
                    return True
                seen = None
            time.sleep(self.lease / 20)
        return True

    def _create(self, name: str, text: str) -> bool:
        """Write an object unless it is there, in one step where the storage can; whether it was written."""
        with self._talking("write to"):
            try:
                self._files.pipe_file(self._at(name), text.encode(), mode="create")
            except FileExistsError:
                return False
            except (TypeError, NotImplementedError):  # of a client without conditional writes
                if self.read(name) is not None:
                    return False
                self._put(name, text)
            return True

    def _put(self, name: str, text: str) -> None:
        with self._talking("write to"):
            self._files.pipe_file(self._at(name), text.encode())

    def _renew(self, claim: str, own: str, released: threading.Event) -> None:
        for number in count(1):
            if released.wait(self.lease / 4):
                return
            with suppress(UserError):  # the next one may succeed
                self._put(claim, f"{own} {number}")

    def _release(self, claim: str, own: str) -> None:
        if (self.read(claim) or b"").startswith(own.encode()):
            self._remove(claim)

    def _remove(self, name: str) -> None:
        with self._talking("write to"), suppress(FileNotFoundError):
            self._files.rm_file(self._at(name))

    def _listed(self) -> list[str]:
        """All objects of the folder, claims included."""
        with self._talking("list"):
            self._files.invalidate_cache()
            try:
                listed = self._files.ls(self._root, detail=False)
            except FileNotFoundError:
                return []
        return [str(path).rstrip("/").rpartition("/")[2] for path in listed]

    def _at(self, name: str) -> str:
        return f"{self._root}/{name}"

    @contextmanager
    def _talking(self, doing: str) -> Iterator[None]:
        """Raises UserError for whatever a client of the storage raises, besides FileNotFoundError in the block."""
        try:
            yield
        except UserError:
            raise
        except Exception as error:
            mend = "check its address and credentials, and start again; what is written stays"
            raise UserError(f"cannot {doing} the bucket {self} ({reason(error)}): {mend}") from error
