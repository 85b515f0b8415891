"""A checkpoint is one file, whole or absent, that holds tensors and plain values alone."""

import os
import zipfile
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from lightning.fabric.plugins import TorchCheckpointIO

from specdraft.errors import UserError
from specdraft.files import atomic_file
from specdraft.text import reason


class CheckpointFile(TorchCheckpointIO):
    """Writes and reads checkpoints for every strategy.

    Only the first rank writes. ``failure`` says which file could not be written, and why: raised there, it would leave
    the other ranks waiting.
    """

    failure: str | None = None

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """Write under a temporary name, bring it to the disk, rename; ``path`` is as before if that fails."""
        try:
            with atomic_file(Path(path)) as temporary, temporary.open("wb") as file:
                torch.save(checkpoint, file)
                file.flush()
                os.fsync(file.fileno())
        except (OSError, RuntimeError, UserError) as error:  # torch wraps what the disk says
            cause = next((each for each in _causes(error) if isinstance(each, OSError)), error)
            why = cause.strerror or str(cause) if isinstance(cause, OSError) else str(cause)
            self.failure = f"{path} cannot be written ({why})"

    def load_checkpoint(self, path: Any, map_location: Any = "cpu", weights_only: bool | None = None) -> dict[str, Any]:
        """Read tensors and plain values, whatever ``weights_only`` says: a pickle can run code."""
        return torch.load(path, map_location="cpu", weights_only=True)


def is_whole(path: Path) -> bool:
    """Whether the file is there to its end and its checksums, which torch writes, are those of its content."""
    try:
        with zipfile.ZipFile(path) as file:
            return file.testzip() is None
    except (zipfile.BadZipFile, OSError, ValueError):
        return False


def checkpoint_step(checkpoint: Path) -> int:
    """Optimizer steps done when ``checkpoint`` was written. Raises UserError."""
    return int(_read(checkpoint)["global_step"])


def checkpoint_config(checkpoint: Path) -> dict[str, Any]:
    """The configuration of the run that wrote ``checkpoint``, empty where there is none. Raises UserError."""
    return _read(checkpoint).get("hyper_parameters", {}).get("run", {}).get("config", {})


def _read(checkpoint: Path) -> dict[str, Any]:
    try:
        held = torch.load(checkpoint, map_location="cpu", weights_only=True, mmap=True)
        int(held["global_step"])
        return held
    except UnpicklingError as error:
        raise UserError(
            f"{checkpoint} is damaged, or holds more than tensors and settings and is not read, because a pickle can "
            "run code: expected a checkpoint of your own; resume another, or start again without resume="
        ) from error
    except Exception as error:  # torch has many kinds for a file that is cut short or something else
        raise UserError(
            f"cannot resume from {checkpoint} ({reason(error)}): expected a whole checkpoint of train.py; name another "
            "with resume=PATH, or start again without"
        ) from error


def _causes(error: BaseException | None) -> Any:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
