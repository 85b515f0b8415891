"""The loggers of a run, opened before any work, and what they are told of it: settings, code, data and target.

A resumed run takes up the curves where they were left."""

import csv
import dataclasses
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
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
    """W&B's step is ours, the number of optimizer steps done. It refuses one that it already has, as when a run that
    crashed behind its last checkpoint resumes."""

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
    """The loggers that ``config.logger`` names. Raises UserError for a missing package or account, before any work.
    With a checkpoint to ``resume`` from, files in ``directory`` begin with the curves of its run up to its step, and
    W&B goes on with the same run; without an answer of its server, offline."""
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
        return logger
    except ModuleNotFoundError as error:
        what = f"logger={name} needs a package that is not installed ({error})"
        raise UserError(f"{what}: install it or use logger=csv") from error
    except Exception as error:
        if name != "wandb":
            raise
        from wandb.errors import AuthenticationError, CommError

        if isinstance(error, AuthenticationError) or not isinstance(error, CommError):
            what = f"W&B cannot be used ({reason(error)})"
            raise UserError(f"{what}: run `wandb login`, or set logger.wandb.offline=true") from error
    offline = "the run is logged offline, and `wandb sync` uploads it later"
    print(f"W&B's server does not answer: {offline}", file=sys.stderr)
    return _open(name, node, **options, offline=True)


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
    lines = path.read_text().splitlines() if path.is_file() else []
    return [row for row in csv.DictReader(lines) if int(row["step"]) <= step]


def _replay(logger: Logger, rows: list[dict[str, str]]) -> None:
    assert isinstance(logger, CSVLogger)
    for row in rows:
        at = int(row.pop("step"))
        logger.experiment.log_metrics({name: float(value) for name, value in row.items() if value}, at)
    logger.save()


@rank_zero_only
def _copy_events(earlier: Path, directory: Path) -> None:
    if earlier.resolve() != directory.resolve():
        for file in (earlier / "tensorboard").glob("events.out.tfevents.*"):
            (directory / "tensorboard").mkdir(parents=True, exist_ok=True)
            shutil.copy2(file, directory / "tensorboard")


def code_version() -> dict[str, Any]:
    """The package's version, the git commit that it was run from and whether files differ from it (None: no git)."""
    found: dict[str, Any] = {"version": specdraft.__version__, "commit": None, "dirty": None}
    root = Path(specdraft.__file__).parents[1]
    # The root must be ours: an installed package may lie below somebody else's repository.
    if (root / ".git").exists():
        command = ["git", "-C", str(root), "status", "--porcelain=v2", "--branch"]
        with suppress(OSError, subprocess.SubprocessError):
            said = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.splitlines()
            found["commit"] = said[0].removeprefix("# branch.oid ")
            found["dirty"] = any(not line.startswith("# ") for line in said)
    return found


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings under dotted names, as they are written on the command line."""
    result: dict[str, Any] = {}
    for key, value in values.items():
        nested = isinstance(value, Mapping) and value
        result |= flat(value, f"{prefix}{key}.") if nested else {f"{prefix}{key}": value}
    return result


@rank_zero_only
def log_identity(
    loggers: list[Logger], settings: Mapping[str, Any], about: Mapping[str, Any], target: Target, data: DataModule
) -> None:
    """Settings, code version and data counts to every logger; to W&B the data and the target as artifacts, which hold
    names, settings and hashes: nothing of the data or the target itself is uploaded."""
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
