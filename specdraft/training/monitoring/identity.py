"""What a run is made of, for its loggers: settings, code, data and target, each by name and by hash."""

import dataclasses
import json
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import Logger, WandbLogger
from lightning.pytorch.utilities import rank_zero_only

import specdraft
from specdraft.data.datamodule import DataModule
from specdraft.targets import Target


def code_version() -> dict[str, Any]:
    """The package's version, the git commit that it was run from and whether files differ from it (None: no git)."""
    commit, changes = (_git(*command) for command in (("rev-parse", "HEAD"), ("status", "--porcelain")))
    return {
        "version": specdraft.__version__,
        "commit": commit,
        "dirty": None if commit is None else bool(changes),
    }


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
