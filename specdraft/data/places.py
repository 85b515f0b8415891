"""Where files that several processes write together lie: a folder of a disk, or a bucket of object storage.

Either way a file appears whole or not at all, and a process *holds* a name while it makes what belongs to it."""

import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Protocol

from specdraft.data.bucket import Bucket, is_url
from specdraft.errors import UserError
from specdraft.files import atomic_file, exclusive, make_directory


class Place(Protocol):
    """Files side by side, without folders below. As text it is how the user names it."""

    def names(self) -> list[str]:
        """All files that are whole, sorted; none if the place is not there yet."""

    def size(self, name: str) -> int:
        """Bytes of a file that is there."""

    def free(self) -> int | None:
        """Bytes that may still be written; None if nobody counts."""

    def read(self, name: str, first: int = 0, stop: int | None = None) -> bytes | None:
        """Bytes ``first`` up to ``stop`` of a file (None: all); None if it is not there."""

    def save(self, name: str, parts: Iterable[bytes]) -> None:
        """Write a file, replacing one of that name. Raises UserError if that fails; nothing is left then."""

    def hold(self, name: str, *leftovers: str, wait: bool = True) -> AbstractContextManager[bool]:
        """Hold ``name``, which one process at a time does; whether it is held: always, if we ``wait``. ``leftovers``:
        patterns of what a killed holder may have left half written, which goes."""

    def forget(self, *patterns: str) -> None:
        """Clear away who holds the names that match, once all that belongs to them is there: a process that is killed
        between a whole file and the release of its name leaves a trace that nobody looks for any more."""


class Folder:
    """A folder of a disk that all processes see. A lock on a file, which the operating system releases when its holder
    dies, says who holds a name."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __str__(self) -> str:
        return str(self.path)

    def names(self) -> list[str]:
        """As ``Place``."""
        files = self.path.iterdir() if self.path.is_dir() else ()
        return sorted(file.name for file in files if not file.name.startswith("."))

    def size(self, name: str) -> int:
        """As ``Place``."""
        return (self.path / name).stat().st_size

    def free(self) -> int:
        """As ``Place``."""
        return shutil.disk_usage(next(one for one in (self.path, *self.path.absolute().parents) if one.is_dir())).free

    def read(self, name: str, first: int = 0, stop: int | None = None) -> bytes | None:
        """As ``Place``. Raises UserError if the file cannot be read."""
        try:
            with (self.path / name).open("rb") as file:
                file.seek(first)
                return file.read(-1 if stop is None else stop - first)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise UserError(f"{self.path / name} cannot be read ({error.strerror}): restore it") from error

    def save(self, name: str, parts: Iterable[bytes]) -> None:
        """As ``Place``."""
        try:
            with atomic_file(self.path / name) as temporary, temporary.open("wb") as file:
                file.writelines(parts)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            said = f"cannot write {self.path / name} ({error.strerror})"
            raise UserError(f"{said}: make room or mend the disk and start again; what is written stays") from error

    @contextmanager
    def hold(self, name: str, *leftovers: str, wait: bool = True) -> Iterator[bool]:
        """As ``Place``."""
        lock = make_directory(self.path) / f".{name}.lock"
        with exclusive(lock, wait) as held:
            for pattern in leftovers if held else ():
                for left in self.path.glob(pattern):
                    left.unlink(missing_ok=True)
            try:
                yield held
            finally:
                if held:
                    lock.unlink(missing_ok=True)

    def forget(self, *patterns: str) -> None:
        """As ``Place``."""
        for pattern in patterns:
            for lock in self.path.glob(f".{pattern}.lock"):
                lock.unlink(missing_ok=True)


def open_place(path: str) -> Place:
    """The folder of that path, or the bucket of that URL. Raises UserError for an unknown or uninstalled protocol."""
    return Bucket(path) if is_url(path) else Folder(Path(path).expanduser())
