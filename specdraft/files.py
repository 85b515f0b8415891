"""Files that are whole or absent: everything is written under a temporary name and renamed into place."""

import errno
import fcntl
import json
import os
import re
import shutil
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from specdraft.errors import UserError

FULL_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_EMBEDDED = "embedded://"


def make_directory(path: Path) -> Path:
    """Create ``path`` with its parents. Raises UserError where that is not allowed."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path).close()  # without a name, so that a kill here leaves nothing behind
    except OSError as error:
        mend = "choose another one or change its permissions"
        raise UserError(f"cannot write to the directory {path} ({error.strerror}): {mend}") from error
    return path


def cache_directory() -> Path:
    """Where what can be made again is kept: ``$SPECDRAFT_CACHE``, or ``~/.cache/specdraft``."""
    return Path(os.environ.get("SPECDRAFT_CACHE") or "~/.cache/specdraft").expanduser()


def embedded(name: str) -> Path | None:
    """The folder inside this package that ``embedded://NAME`` means; None for any other name. It may not exist."""
    plain = name.removeprefix(_EMBEDDED)
    if plain == name:
        return None
    return Path(__file__).parent / "embedded" / (plain.replace("-", "_") if re.fullmatch(r"[\w-]+", plain) else "?")


def _sibling(path: Path) -> Path:
    return path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.tmp")


def no_room(what: object, code: int) -> str:
    """The sentence for a disk that is full: what was to be written, and the number of the error."""
    return f"{what} cannot be written ({os.strerror(code)}): free some space or choose another place"


@contextmanager
def _full_disk_named(path: Path) -> Iterator[None]:
    """Raises UserError for a disk without room, of which neither a file's ``write`` nor safetensors says whose."""
    try:
        yield
    except Exception as error:
        said = re.search(r"\(os error (\d+)\)", str(error))
        code = error.errno if isinstance(error, OSError) else said and int(said[1])
        if code not in FULL_DISK:
            raise
        raise UserError(no_room(path, code)) from error


@contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside ``path``; it takes ``path``'s place when the block ends without an error. Raises
    UserError where the disk is full."""
    make_directory(path.parent)
    temporary = _sibling(path)
    try:
        with _full_disk_named(path):
            yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> Path:
    """Write a file that is whole or absent; gives ``path``."""
    with atomic_file(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
    return path


@contextmanager
def atomic_directory(path: Path) -> Iterator[Path]:
    """Yield a temporary directory beside ``path``; it replaces ``path`` when the block ends without an error. Whoever
    may read the directory may read its files, whatever wrote them: safetensors gives them to their owner alone. Raises
    UserError where the disk is full."""
    make_directory(path.parent)
    temporary, previous = _sibling(path), _sibling(path)
    temporary.mkdir()
    try:
        with _full_disk_named(path):
            yield temporary
        readable = temporary.stat().st_mode & 0o444
        for file in temporary.rglob("*"):
            file.chmod(file.stat().st_mode | readable)
        if path.exists():
            path.rename(previous)
        temporary.rename(path)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        shutil.rmtree(previous, ignore_errors=True)


@contextmanager
def exclusive(path: Path, wait: bool = True) -> Iterator[bool]:
    """Hold the lock file ``path``, which one process at a time can; yields whether it is held.
    Without ``wait`` a lock held elsewhere yields False at once. The kernel releases the lock of a killed process."""
    make_directory(path.parent)
    while True:
        with path.open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            except BlockingIOError:
                yield False
                return
            if _names(path, file):
                try:
                    yield True
                finally:  # closing is not enough where a process that was forked meanwhile has the file too
                    fcntl.flock(file, fcntl.LOCK_UN)
                return


def _names(path: Path, file: IO[str]) -> bool:
    """Whether ``path`` is still that of the open file: the last holder may have removed it, and a lock on it is then
    seen by nobody else; others may make one anew and remove that too, at any moment."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def read_json(path: Path) -> Any:
    """Parse a JSON file. Raises UserError if it is missing or malformed."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path} does not exist: check the path") from None
    except (ValueError, OSError, RecursionError) as error:
        raise UserError(f"{path} is not readable JSON ({error}): restore or rewrite the file") from error


def member(folder: Path, name: str) -> Path:
    """The file ``name`` of ``folder``. Raises UserError for a name or a link that leads out of the folder.
    A snapshot in the hub's cache consists of links to ``blobs/`` beside it, which are its own."""
    home = folder.resolve()
    places = [home, home.parent.parent / "blobs"] if home.parent.name == "snapshots" else [home]
    try:
        inside = any((folder / name).resolve().is_relative_to(place) for place in places)
    except (OSError, ValueError, RuntimeError):  # no name of a file, or links in a circle
        inside = False
    if not inside:
        raise UserError(f"{folder} names the file {name!r}, which lies elsewhere: expected files of that folder alone")
    return folder / name
