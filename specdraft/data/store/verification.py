"""Each node reads a file once to verify its checksum, whatever number of ranks, workers and runs open it.

An empty file in the node's temporary directory says that it was done; its name is a hash of what a change of the file
changes. Who verifies holds a lock, which the operating system releases when its holder dies."""

import os
import tempfile
from pathlib import Path

from specdraft.errors import UserError
from specdraft.files import exclusive
from specdraft.text import file_fingerprint, fingerprint


def verify(file: Path, mend: str) -> None:
    """Raises UserError unless the file's checksum is the one at the end of its name; ``mend`` says what helps."""
    known = file.stat()
    identity = [str(file.resolve()), known.st_dev, known.st_ino, known.st_size, known.st_mtime_ns, known.st_ctime_ns]
    done = _folder() / fingerprint(identity, 32)
    if done.exists():
        return
    with exclusive(done.with_suffix(".lock")):
        if not done.exists():
            found = file_fingerprint(file)
            if not file.stem.endswith(f"-{found}"):
                said = f"{file} is damaged: its checksum is {found}, expected the one in its name"
                raise UserError(f"{said}; {mend}")
            done.touch()
        done.with_suffix(".lock").unlink(missing_ok=True)


def _folder() -> Path:
    """This user's own, so that nobody else can say that a file was verified."""
    folder = Path(tempfile.gettempdir()) / f"specdraft-verified-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise UserError(f"{folder} belongs to another user: expected it to be ours; take it away, or set TMPDIR")
    return folder
