"""The loggers of a run, opened before any work, and what they are told of it: settings, code, data and target.

A resumed run takes up the curves where they were left.
"""

import csv
import dataclasses
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import CSVLogger, Logger, WandbLogger
from lightning.pytorch.utilities import rank_zero_only
from omegaconf import DictConfig

import specdraft
from specdraft.data.datamodule import DataModule
from specdraft.entry import build
from specdraft.errors import UserError
from specdraft.targets import Target
from specdraft.text import reason
from specdraft.training.checkpoints.file import checkpoint_step

INIT_SECONDS, FINISH_SECONDS = 20.0, 60.0  # until W&B's server must have answered, and what is left have arrived
_RUN_ID = "wandb-run-id"  # in the run directory


class StepwiseWandbLogger(WandbLogger):
    """W&B's step is ours, the number of optimizer steps done.

    Then W&B itself refuses a step that it already has, as when a run that crashed behind its last checkpoint resumes.
    """

    def __init__(self, *, offline: bool = False, **kwargs: Any) -> None:
        """W&B's own settings, with an end to its patience: it would keep a finished run waiting for a server."""
        settings = {"init_timeout": INIT_SECONDS, "finish_timeout": FINISH_SECONDS}
        # Lightning says "offline" by an environment variable, which would hold for every later run of the process.
        super().__init__(mode="offline" if offline else None, settings=settings, **kwargs)

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Send values (or tables) of a step."""
        self.experiment.log({**metrics, "trainer/global_step": step}, step=step)


def build_loggers(config: DictConfig, directory: Path, resume: Path | None) -> list[Logger]:
    """The loggers that ``config.logger`` names, so that a missing package or account shows before any work.

    With a checkpoint to ``resume`` from, files in ``directory`` begin with the curves of its run up to its step, and
    W&B goes on with the same run; without an answer of its server, offline. Raises UserError.
    """
    loggers: list[Logger] = []
    earlier, step = (None, 0) if resume is None else (resume.parent.parent, checkpoint_step(resume))
    rows = [] if earlier is None else _csv_rows(earlier, step)  # before a logger of the same directory replaces them
    for name, node in config.logger.items():
        options: dict[str, Any] = {}
        if earlier is not None and name == "tensorboard":
            _copy_events(earlier, directory)
            options["purge_step"] = step + 1  # what came behind the checkpoint comes again
        if earlier is not None and name == "wandb" and (earlier / _RUN_ID).is_file():
            options["id"] = (earlier / _RUN_ID).read_text().strip()
        loggers.append(_open(str(name), node, **options))
        if rows and name == "csv":
            _replay(loggers[-1], rows)
    _note_run(loggers, directory)
    return loggers


def _open(name: str, node: DictConfig, **options: Any) -> Logger:
    try:
        logger = build(node, **options)
        _ = logger.experiment
    except ModuleNotFoundError as error:
        raise UserError(
            f"logger={name} needs a package that is not installed ({error}): install it or use logger=csv"
        ) from error
    except Exception as error:
        if name != "wandb":
            raise
        if _unreachable(error):
            print(
                "W&B's server does not answer: the run is logged offline, and `wandb sync` uploads it later",
                file=sys.stderr,
            )
            return _open(name, node, **options, offline=True)
        raise UserError(
            f"W&B cannot be used ({reason(error)}): run `wandb login`, or set logger.wandb.offline=true"
        ) from error
    return logger


def _unreachable(error: Exception) -> bool:
    from wandb.errors import AuthenticationError, CommError

    return isinstance(error, CommError) and not isinstance(error, AuthenticationError)


@rank_zero_only
def _note_run(loggers: list[Logger], directory: Path) -> None:
    for logger in loggers:
        if isinstance(logger, WandbLogger):
            (directory / _RUN_ID).write_text(f"{logger.version}\n")


@rank_zero_only
def close(loggers: list[Logger]) -> None:
    """Let go of W&B's run: the next job of a sweep in this process begins one of its own."""
    for logger in loggers:
        if isinstance(logger, WandbLogger):
            logger.experiment.finish()


def where(logger: Logger) -> Path:
    """The file or directory that holds its curves."""
    if isinstance(logger, CSVLogger):
        return Path(logger.log_dir) / "metrics.csv"
    return Path(str(logger.save_dir)) / "wandb" if isinstance(logger, WandbLogger) else Path(str(logger.log_dir))


def _csv_rows(earlier: Path, step: int) -> list[dict[str, str]]:
    path = earlier / "metrics.csv"
    if not path.is_file():
        return []
    with path.open(newline="") as file:
        return [row for row in csv.DictReader(file) if int(row["step"]) <= step]


def _replay(logger: Logger, rows: list[dict[str, str]]) -> None:
    assert isinstance(logger, CSVLogger)
    for row in rows:
        at = int(row.pop("step"))
        logger.experiment.log_metrics({name: float(value) for name, value in row.items() if value}, at)
    logger.save()


@rank_zero_only
def _copy_events(earlier: Path, directory: Path) -> None:
    if earlier.resolve() == directory.resolve():
        return
    for file in (earlier / "tensorboard").glob("events.out.tfevents.*"):
        (directory / "tensorboard").mkdir(parents=True, exist_ok=True)
        shutil.copy2(file, directory / "tensorboard")


def code_version() -> dict[str, Any]:
    """The package's version, the git commit that it was run from and whether files differ from it (None: no git)."""
    commit, changes = (_git(*command) for command in (("rev-parse", "HEAD"), ("status", "--porcelain")))
    return {"version": specdraft.__version__, "commit": commit, "dirty": None if commit is None else bool(changes)}


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings under dotted names, as they are written on the command line."""
    result: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            result |= flat(value, f"{prefix}{key}.")
        else:
            result[f"{prefix}{key}"] = value
    return result


@rank_zero_only
def log_identity(
    loggers: list[Logger], settings: Mapping[str, Any], about: Mapping[str, Any], target: Target, data: DataModule
) -> None:
    """Settings, code version and data counts to every logger; to W&B the data and the target as artifacts.

    The artifacts hold names, settings and hashes; nothing of the data or the target itself is uploaded.
    """
    record = flat({**settings, "code": code_version(), "data_counts": about})
    rows = data.about("train")["fingerprint"]
    for logger in loggers:
        logger.log_hyperparams(record)
        if isinstance(logger, WandbLogger):
            _note(logger, "dataset", str(about["source"]), data.preparation.settings() | {"train_rows": rows})
            _note(logger, "target", target.identity.name, dataclasses.asdict(target.identity))


def _note(logger: WandbLogger, kind: str, name: str, identity: Mapping[str, Any]) -> None:
    import wandb

    # Letters, digits and -_. are what W&B takes in a name, 128 of them.
    written = re.sub(r"[^\w.-]+", "-", f"{kind}-{name}")[:128]
    artifact = wandb.Artifact(written, type=kind, metadata=dict(identity))
    # W&B numbers versions by content: other hashes are another version, the same hashes the same one.
    with artifact.new_file("identity.json") as file:
        json.dump(identity, file, indent=2, sort_keys=True)
    logger.experiment.log_artifact(artifact)


def _git(*command: str) -> str | None:
    # The root must be ours: an installed package may lie below somebody else's repository.
    root = Path(specdraft.__file__).parents[1]
    if not (root / ".git").exists():
        return None
    try:
        done = subprocess.run(["git", "-C", str(root), *command], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
