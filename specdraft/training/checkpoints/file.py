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
    """Writes and reads checkpoints for every strategy. Only the first rank writes: ``failure`` says which file could
    not be written, and why, as an error raised there would leave the other ranks waiting."""

    failure: str | None = None

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """Write under a temporary name, bring it to the disk, rename; ``path`` is as before if that fails."""
        try:
            with atomic_file(Path(path)) as temporary, temporary.open("wb") as file:
                torch.save(checkpoint, file)
                file.flush()
                os.fsync(file.fileno())
        except (OSError, RuntimeError, UserError) as error:  # torch wraps what the disk says
            self.failure = f"{path} cannot be written ({_cause(error)})"

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


def checkpoint_optimizer(checkpoint: Path) -> str:
    """The name of the optimizer whose states ``checkpoint`` holds: muon, adamw or sgd. Raises UserError."""
    groups = [group for state in _read(checkpoint)["optimizer_states"] for group in state["param_groups"]]
    if any("ns_steps" in group for group in groups):
        return "muon"
    return "adamw" if any("betas" in group for group in groups) else "sgd"


def _read(checkpoint: Path) -> dict[str, Any]:
    try:
        held = torch.load(checkpoint, map_location="cpu", weights_only=True, mmap=True)
        int(held["global_step"])
        return held
    except UnpicklingError as error:
        what = f"{checkpoint} is damaged, or holds more than tensors and settings, which could run code"
        mend = "resume another, or start again without resume="
        raise UserError(f"{what}: expected a checkpoint of your own; {mend}") from error
    except Exception as error:  # torch has many kinds for a file that is cut short or something else
        what = f"cannot resume from {checkpoint} ({reason(error)}): expected a whole checkpoint of train.py"
        raise UserError(f"{what}; name another with resume=PATH, or start again without") from error


def _cause(error: BaseException) -> str:
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OSError):
        cause = cause.__cause__ or cause.__context__
    return str(error) if cause is None else cause.strerror or str(cause)
