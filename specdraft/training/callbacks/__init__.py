"""Lightning callbacks, wired in ``conf/callbacks``: live acceptance, checkpoints, guards, progress, samples."""

from typing import TypeVar

from lightning import Callback, Trainer

C = TypeVar("C", bound=Callback)


def find_callback(trainer: Trainer, kind: type[C]) -> C | None:
    """The trainer's callback of that class, or None."""
    found = (each for each in trainer.callbacks if isinstance(each, kind))  # type: ignore[attr-defined]
    return next(found, None)
