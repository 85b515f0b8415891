"""Which checkpoint a run continues from."""

import re
from collections.abc import Callable, Iterable
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from specdraft.errors import UserError
from specdraft.training.checkpoints.file import checkpoint_config, checkpoint_optimizer, checkpoint_step, is_whole

CHECKPOINTS = "checkpoints"  # of a run directory
LAST = "last.ckpt"  # a link to the newest
_DECIDING = ("model.drafter._target_", "quantize", "data.seed", "data.sequence_length", "data.limit", "data.regenerate")
_OF_ANSWERS = ("data.temperatures", "data.max_new_tokens")
_STEP = re.compile(r"step-(\d+)\.ckpt")


def step_name(step: int) -> str:
    """The name of the checkpoint after ``step`` optimizer steps."""
    return f"step-{step:06d}.ckpt"


def by_step(directory: Path, until: int | None = None) -> list[Path]:
    """The checkpoints of a directory that are named by their step, newest first; ``until`` that step, or all."""
    named = ((_STEP.fullmatch(path.name), path) for path in directory.glob("step-*.ckpt"))
    numbered = sorted(((int(match[1]), path) for match, path in named if match), reverse=True)
    return [path for step, path in numbered if until is None or step <= until]


def find_resume(resume: str | None, family: Path, note: Callable[[str], None]) -> Path | None:
    """The checkpoint to continue from; instead of a damaged one it is the one before, and ``note`` is told.
    ``resume`` is None (start from scratch), "auto" (the newest run below ``family``, the directory that holds the
    runs of one target and model), a ``.ckpt`` path or a run directory. Raises UserError where none is whole."""
    if resume is None:
        return None
    if resume == "auto":
        return _auto(family, note)
    path = Path(resume).expanduser()
    candidates = [path] if path.suffix == ".ckpt" else [path / CHECKPOINTS / LAST, path / LAST]
    given = next((each for each in candidates if each.exists()), None)
    if given is None:
        raise UserError(f"resume={resume}: {candidates[0]} does not exist; give a run directory, a .ckpt path, or auto")
    if given.name != LAST:
        return given.resolve()
    return _newest_whole(_of_run(given.parent), note) or given.resolve()  # whose reading says what is wrong with it


def check_unfinished(checkpoint: Path, max_steps: int) -> None:
    """Raises UserError if there is nothing left to train: the run would have a head, and no checkpoint or curve."""
    if (step := checkpoint_step(checkpoint)) >= max_steps:
        what = f"the checkpoint {checkpoint} has {step} steps and trainer.max_steps is {max_steps}"
        mend = "raise trainer.max_steps to train on; evaluate.py and export take its head as it is"
        raise UserError(f"{what}: {mend}")


def check_alike(checkpoint: Path, config: DictConfig) -> None:
    """Raises UserError if the run trains another kind of drafter than the checkpoint's, or on other data. Loading it
    tells for sure, after the target has answered every prompt. Where the data lie may have changed."""
    theirs = OmegaConf.create(checkpoint_config(checkpoint))
    for key in (*_DECIDING, *(_OF_ANSWERS if OmegaConf.select(config, "data.regenerate") else ())):
        now = OmegaConf.select(config, key)
        was = OmegaConf.select(theirs, key, default=now)
        if was != now:
            what = f"the checkpoint {checkpoint} was trained with {key}={was}, and this run has {now}"
            raise UserError(f"{what}: resume with the settings of that run, or start again without resume=")


def resumed_optimizer(checkpoint: Path, name: str, sharded: bool) -> str:
    """The optimizer that goes on from ``checkpoint``: where ``name`` is auto, its own. Raises UserError for
    another one, and for Muon where the optimizer is ``sharded``, which updates whole matrices."""
    was = checkpoint_optimizer(checkpoint)
    if name not in ("auto", was):
        what = f"the checkpoint {checkpoint} was trained with model.optimizer.name={was}, and this run has {name}"
        raise UserError(f"{what}: resume with {was}, or begin another training from that head with init=")
    if was == "muon" and sharded:
        what = f"the checkpoint {checkpoint} was trained with Muon, which updates matrices, and DeepSpeed cuts them"
        raise UserError(f"{what}: expected strategy=single or strategy=ddp")
    return was


def _auto(family: Path, note: Callable[[str], None]) -> Path | None:
    links = sorted(family.glob(f"*/{CHECKPOINTS}/{LAST}"), key=lambda path: path.stat().st_mtime, reverse=True)
    if not links:
        note(f"resume=auto: no earlier run below {family}, starting from scratch")
        return None
    found = _newest_whole([path for link in links for path in _of_run(link.parent)], note)
    if found is None:
        what = f"resume=auto: every checkpoint below {family} is damaged ({links[0].resolve()} is the newest)"
        mend = "restore one and name it with resume=PATH, or start again without resume="
        raise UserError(f"{what}: expected one that is whole; {mend}")
    return found


def _of_run(directory: Path) -> list[Path]:
    last = (directory / LAST).resolve()
    return [last, *(path.resolve() for path in by_step(directory) if path.resolve() != last)]


def _newest_whole(paths: Iterable[Path], note: Callable[[str], None]) -> Path | None:
    damaged: list[str] = []
    for path in paths:
        if is_whole(path):
            if damaged:
                note(f"{', '.join(damaged)} cannot be read to the end: resuming from {path}, the one before")
            return path
        damaged.append(str(path))
    return None
