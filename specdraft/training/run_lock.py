"""A directory is one run's: no other writes there, neither meanwhile nor afterwards."""

import fcntl
import os
from pathlib import Path

from lightning.pytorch.utilities import rank_zero_only

from specdraft.errors import UserError
from specdraft.leftovers import LOCK, owner
from specdraft.training.checkpoints.resume import CHECKPOINTS


@rank_zero_only
def acquire_run_lock(directory: Path, resume: Path | None = None) -> None:
    """Make ``directory`` the first rank's own until it ends, however it ends. Raises UserError if it is another's, or
    holds what an earlier run has trained, unless that is what the checkpoint ``resume`` continues."""
    # A lock of a process, not of its children, which the kernel lets go; open until then, as closing would let go.
    place = os.open(directory / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.lockf(place, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        holder = os.read(place, 100).decode(errors="replace").strip() or "unknown"
        os.close(place)
        what = f"another run writes into {directory} (process {holder})"
        raise UserError(f"{what}: wait for it, stop it, or choose another hydra.run.dir") from error
    os.truncate(place, 0)
    os.write(place, f"{owner()}\n".encode())
    trained = (directory / "drafter").exists() or any((directory / CHECKPOINTS).glob("*.ckpt"))
    # A job that is put back into the queue begins again with the same directory.
    if trained and (resume is None or resume.parent.resolve() != (directory / CHECKPOINTS).resolve()):
        os.close(place)
        mend = f"choose another hydra.run.dir, or continue it with resume={directory}"
        raise UserError(f"{directory} holds a run: {mend}")
